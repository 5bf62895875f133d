"""Pipeline: who waits for whom?"""

from __future__ import annotations

from deploy.dashboards.board import Board, Section
from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import actor_gauge, actor_mean, actor_rate, gauge, in_range, increase, mean, quantile, rate

_WHO_WAITS = Section(
    "Who waits",
    (
        Panel(
            "Busy",
            "Share of time in which the trainer computes, and in which actors have at least one sequence in progress; choose "
            "a window of some steps.",
            "Both near 1.",
            "Trainer low: too few actors. Actors low: too many, or the lag bound holds them back.",
            (
                Query(rate("trainer_step_phase_seconds_sum", matchers='phase="compute"'), "trainer"),
                Query(f"avg by (namespace, run) ({actor_rate('busy_seconds_total')})", "actors"),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Trainer's time by phase",
            "Share of a step by phase; wait: for sequences; send: until the previous version is served.",
            "compute above 80%.",
            "Much wait: generation is the bottleneck. Much send or snapshot: weight updates are.",
            (
                Query(
                    f"{rate('trainer_step_phase_seconds_sum', 'phase')} / on (namespace, run) group_left () "
                    f"({rate('trainer_step_seconds_sum')} > 0)",
                    "{{phase}}",
                ),
            ),
            unit="percentunit",
            kind="stacked",
            low=0,
            high=1,
        ),
        Panel(
            "Actors' places in use",
            "Sequences in progress over actor.sequences_in_progress, by actor.",
            "Near 1; less if actors outrun the trainer, because they idle rather than stockpile.",
            "Low for all, little in flight: no prompts are issued (next panel). Low for one: it gets none, leaves or hangs.",
            (Query(f"{actor_gauge('sequences_in_progress')} / ({actor_gauge('sequences_in_progress_max')} > 0)", "{{actor}}"),),
            unit="percentunit",
            low=0,
        ),
        Panel(
            "Feeder",
            "Groups that may be issued now within the lag bound, and groups complete for the next steps.",
            "Allowance small and positive, some groups ready.",
            "Allowance at 0 and actors idle: the lag bound holds generation back. Ready at 0: the trainer waits.",
            (Query(gauge("trainer_feeder_allowance_groups"), "allowance"), Query(gauge("trainer_ready_groups"), "ready")),
        ),
        Panel(
            "In flight",
            "Sequences that are in progress or wait for a step, and the limit that keeps data fresh.",
            "At the limit.",
            "Far below the limit: the lag bound holds generation back, or actors take no prompts.",
            (
                Query(gauge("trainer_in_flight_sequences"), "in flight"),
                Query(gauge("trainer_in_flight_limit_sequences"), "limit"),
            ),
            unit="locale",
            low=0,
        ),
        Panel(
            "Actors wanted and there",
            "How many actors would keep the trainer busy within the lag bound, how many are members, how many take prompts.",
            "The three agree.",
            "Wanted far above the members: scale up. Far below: actors idle at your cost.",
            (
                Query(gauge("actor_replicas_wanted"), "wanted"),
                Query(gauge("trainer_members", matchers='state="serving"'), "members"),
                Query(gauge("actor_ready", of="sum"), "ready"),
            ),
            low=0,
        ),
        Panel(
            "Idle because of weight updates",
            "Mean time of a step in which the trainer computes nothing because of sending, and share of time actors stall.",
            "Both near 0.",
            "Growing with the number of actors or the size of the model: see Weight updates.",
            (
                Query(mean("trainer_update_idle_seconds"), "trainer, seconds a step"),
                Query(actor_rate("stall_seconds_sum"), "{{actor}}, share of time"),
            ),
            low=0,
        ),
        Panel(
            "Cost of evaluation",
            "Share of time in which evaluations hold commits, and tokens of evaluations relative to those of training.",
            "Both far below 1; meanwhile training continues on older data.",
            "Near 1: evaluations follow one another. Raise evaluation.every_steps, or evaluate fewer problems.",
            (
                Query(rate("trainer_commits_held_seconds_total"), "commits held"),
                Query(f"{rate('trainer_heldout_tokens_total')} / ({rate('trainer_tokens_total')} > 0)", "tokens"),
            ),
            unit="percentunit",
            low=0,
        ),
    ),
)

_FLOW = Section(
    "Flow",
    (
        Panel(
            "Tokens per second",
            "Completion tokens generated by all actors, arrived at the trainer, and trained on.",
            "The three lines lie together.",
            "Generated above trained for long: work is lost or piles up.",
            (
                Query(rate("actor_generated_tokens_total"), "generated"),
                Query(rate("trainer_tokens_arrived_total"), "arrived"),
                Query(rate("trainer_tokens_total", matchers='outcome="trained"'), "trained"),
            ),
            low=0,
        ),
        Panel(
            "Messages on the streams",
            "Messages of PROMPTS that no actor has finished, messages of SEQUENCES, and those not read yet.",
            "prompts and unread are bounded; sequences falls at each checkpoint, which purges the log.",
            "unread grows: the trainer cannot keep up. prompts grows: actors take none.",
            (
                Query(gauge("trainer_stream_messages", "stream"), "{{stream}}"),
                Query(gauge("trainer_unread_sequences"), "sequences not read"),
            ),
            unit="locale",
            low=0,
        ),
        Panel(
            "Oldest message",
            "Age of the oldest message of each stream.",
            "prompts: a few times the duration of a sequence; sequences: the age of the oldest kept checkpoint.",
            "prompts grows without end: no actor finishes some group.",
            (Query(gauge("trainer_stream_oldest_seconds", "stream"), "{{stream}}"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Bytes on the streams",
            "Size of each stream.",
            "Below half of nats.sequencesMaxGib.",
            "Near the bound: publishing stops, and generation with it.",
            (Query(gauge("trainer_stream_bytes", "stream"), "{{stream}}"),),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Publish and verify",
            "Mean time of a verifier call and of a publish until its acknowledgement, as actors see them.",
            "Milliseconds.",
            "Seconds: finished sequences wait and block their places.",
            (Query(mean("actor_verify_seconds"), "verify"), Query(mean("actor_publish_seconds"), "publish")),
            unit="s",
            low=0,
        ),
        Panel(
            "Handed over",
            "Sequences per second that leaving actors handed over, and that others continued; tokens handed over.",
            "Only when actors leave; continued follows handed over.",
            "All the time: actors are being stopped again and again.",
            (
                Query(rate("actor_sequences_handed_over_total", "state"), "handed over, {{state}}"),
                Query(rate("actor_sequences_continued_total", "state"), "continued, {{state}}"),
                Query(rate("actor_carried_tokens_total"), "tokens carried"),
            ),
            unit="cps",
            low=0,
        ),
    ),
)

_EPISODES = Section(
    "Episodes",
    (
        Panel(
            "Episodes under way",
            "Episodes of all actors that decode a turn, and that wait for their environment or a place.",
            "At the actors' limit, with as many decoding as there are places (above).",
            "At the limit while places are free: raise actor.episodes_in_progress.",
            (Query(gauge("actor_episodes_in_progress", of="sum")),),
            low=0,
        ),
        Panel(
            "Turns",
            "Requested turns that were sampled or, if an episode runs again, replayed; and dropped recorded turns.",
            "Sampled only.",
            "Replayed: verifiers die or actors leave. Dropped: repeated episodes take another course.",
            (
                Query(rate("actor_episode_turns_total", "source"), "{{source}}"),
                Query(rate("actor_episode_dropped_turns_total"), "dropped"),
            ),
            unit="cps",
            low=0,
        ),
        Panel(
            "Episodes of a step",
            "Means over a step: turns, branches, and the share of tokens that environments added. Empty without episodes.",
            "Branches at 1, unless agents rewrite their history.",
            "Observed near 1: most of what the trainer computes is not trained on.",
            (
                Query(gauge("trainer_episode_turns"), "turns"),
                Query(gauge("trainer_episode_branches"), "branches"),
                Query(gauge("trainer_observed_ratio"), "observed"),
            ),
            low=0,
        ),
        Panel(
            "Branches and requests not heeded",
            "Branches after an episode's first; refused requests; and requests that ask for other sampling.",
            "Near 0, unless agents rewrite their history or send parallel requests.",
            "Many branches: each has its whole history as prompt. Refusals: docs/episodes.md lists the codes.",
            (
                Query(rate("actor_episode_branches_total"), "branches"),
                Query(rate("actor_episode_refusals_total", "code"), "refused, {{code}}"),
                Query(rate("actor_episode_ignored_fields_total", "field"), "not heeded, {{field}}"),
            ),
            unit="cps",
            low=0,
        ),
    ),
)

_TRAINER = Section(
    "Trainer",
    (
        Panel(
            "Step time",
            "Time of one optimizer step, including waiting.",
            "Steady.",
            "It grows: look at the phases.",
            (Query(mean("trainer_step_seconds"), "mean"), Query(quantile(0.95, "trainer_step_seconds"), "95%")),
            unit="s",
            low=0,
        ),
        Panel(
            "Compute by phase",
            "Mean seconds of a step: packing (plan, build; during the previous step), then the device's work.",
            "forward_backward takes most of it.",
            "optimizer or to_device as long as forward_backward; build longer than a step.",
            (Query(mean("trainer_compute_phase_seconds", "phase"), "{{phase}}"),),
            unit="s",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Trainer's speed",
            "Tokens over compute time, by kind of tokens.",
            "Steady.",
            "It falls with the same model: short rows, throttling, or another process on the device.",
            (Query(gauge("trainer_tokens_per_second", "tokens"), "{{tokens}}"),),
            low=0,
        ),
        Panel(
            "Utilisation",
            "Model FLOPs utilization (known devices only), fill of the micro-batches, time that ranks wait for each other.",
            "Fill above 0.9; imbalance near 0.",
            "Fill low: raise trainer.tokens_per_microbatch. Imbalance high: few long sequences.",
            (
                Query(gauge("trainer_mfu_ratio"), "MFU"),
                Query(gauge("trainer_packing_fill_ratio"), "fill"),
                Query(gauge("trainer_imbalance_ratio"), "imbalance"),
            ),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Memory",
            "Most memory that the trainer has used.",
            "Flat after the first steps.",
            "It climbs towards the device's or the pod's limit.",
            (Query(gauge("trainer_memory_peak_bytes"), "peak"),),
            unit="bytes",
            low=0,
        ),
        Panel(
            "Orders to other nodes",
            "Orders that further nodes of the trainer carried out, by kind. Empty with one node.",
            "train at the rate of steps on every node.",
            "Flat while the trainer waits: that node hangs.",
            (Query(rate("trainer_rank_orders_total", "kind", "pod"), "{{pod}} {{kind}}"),),
            unit="cps",
            low=0,
        ),
        Panel(
            "Checkpoints",
            "Mean time to write a checkpoint, during training.",
            "Much shorter than the interval between two checkpoints.",
            "As long as the interval: storage is too slow.",
            (Query(mean("trainer_checkpoint_seconds"), "mean"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Uploads",
            "For how long a checkpoint has been waiting to be uploaded, how long an upload takes, and attempts in the window. "
            "Empty without checkpoint.upload.",
            "No checkpoint waits for longer than an upload takes.",
            "It waits ever longer, and attempts fail: the trainer's log has the store's error.",
            (
                Query(gauge("trainer_checkpoint_upload_waiting_seconds"), "waiting"),
                Query(mean("trainer_checkpoint_upload_seconds"), "upload, mean"),
                Query(increase("trainer_checkpoint_uploads_total", "outcome"), "{{outcome}} tries"),
            ),
            unit="s",
            low=0,
        ),
    ),
)

_ACTORS = Section(
    "Actors",
    (
        Panel(
            "Decode step, by actor",
            "Mean time of one decode step of the engine.",
            "Steady for a steady number of sequences.",
            "It grows on one actor: look at its node; on all: KV cache is short, sequences are preempted.",
            (Query(actor_mean("decode_step_seconds"), "{{actor}}"),),
            unit="s",
            low=0,
        ),
        Panel(
            "KV cache in use, by actor",
            "Share of the engine's KV cache.",
            "Below 0.9.",
            "At 1: sequences are preempted; lower actor.sequences_in_progress or give more memory.",
            (Query(actor_gauge("kv_cache_usage_ratio"), "{{actor}}"),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Tokens per second, by actor",
            "Completion tokens generated.",
            "Alike on alike nodes.",
            "One is far below the others, or at 0.",
            (Query(actor_rate("generated_tokens_total"), "{{actor}}"),),
            low=0,
        ),
        Panel(
            "Busy, by actor",
            "Share of time with at least one sequence in progress.",
            "1.",
            "Low: it gets no prompts, or may not generate because its version is too old.",
            (Query(actor_rate("busy_seconds_total"), "{{actor}}"),),
            unit="percentunit",
            low=0,
        ),
        Panel(
            "Groups held and given up",
            "Prompt groups that each actor holds, and groups abandoned as dead letters in the time range shown.",
            "A few held; none abandoned.",
            "Abandoned: `pipelinerl dead-letters` shows the prompts and the reasons.",
            (Query(actor_gauge("prompts_held_groups"), "{{actor}}"), Query(in_range("actor_dead_letters_total"), "given up")),
            low=0,
        ),
    ),
)

_LOCAL = Section(
    "On one machine: the runner",
    (
        Panel(
            "Processes",
            "Running processes of a local run, and the wanted number of actors. Empty in a cluster.",
            "One trainer, verifier and nats, and as many actors as are wanted.",
            "Fewer: one is being started again; the run directory's logs say why.",
            (Query(gauge("runner_processes", "process"), "{{process}}"), Query(gauge("runner_actors_wanted"), "actors wanted")),
            low=0,
        ),
        Panel(
            "Processes started again",
            "Processes that died and were restarted.",
            "None.",
            "The same one again and again.",
            (Query(increase("runner_restarts_total", "process"), "{{process}}"),),
            low=0,
        ),
        Panel(
            "Running since",
            "Time since the runner started.",
            "It grows.",
            "It restarts from 0: the run was resumed.",
            (Query(f"time() - {gauge('runner_start_timestamp_seconds')}"),),
            unit="s",
            low=0,
        ),
    ),
)

PIPELINE = Board("pipeline", "Pipeline", "Who waits for whom?", (_WHO_WAITS, _FLOW, _EPISODES, _TRAINER, _ACTORS, _LOCAL))
