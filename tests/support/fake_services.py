"""Stand-ins for the three services, as small processes that keep to the runner's contract: settings in the environment,
an address file, /readyz, gRPC, SIGTERM. They train nothing. Run as `python fake_services.py KIND`.

FAKE_* variables make them misbehave: see `FAKE`. The trainer keeps to the rules of a restart: it writes lineage.json, goes on
from the newest checkpoint, cuts metrics.jsonl to it, and on SIGTERM writes a checkpoint and an interrupted summary. It imports
only what it needs: a test starts dozens of these.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

SETTINGS = {key.removeprefix("PIPELINERL_").lower(): value for key, value in os.environ.items()}


FAKE = {key.removeprefix("FAKE_"): value for key, value in os.environ.items() if key.startswith("FAKE_")}
"""How to misbehave. STEP_S: seconds of a step. CRASH_AT_STEP, EXIT_CODE: of the trainer. CHECKPOINT_EVERY: so many steps.
PAUSES: steps that the trainer goes on from only when the run's folder has a file go-on-STEP; with `model`, the process that
makes the model waits for the file go-on-model. SLOW_CHECKPOINT: the last one waits for the file go-on-checkpoint. DEAF: kinds
or names of those that ignore SIGTERM. ACTOR_EXIT: an actor, of ONLY_ACTOR's name if that is given, exits so."""
PAUSES = FAKE.get("PAUSES", "").split(",")


async def serve(grpc_port: int) -> None:
    """Answers every HTTP request with 200, and writes the address file."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", int(SETTINGS.get("http_port", "0")))
    http_port = server.sockets[0].getsockname()[1]
    address = {"grpc": f"127.0.0.1:{grpc_port}", "http": f"127.0.0.1:{http_port}", "pid": os.getpid()}
    file = Path(SETTINGS["address_file"])
    file.with_suffix(".part").write_text(json.dumps(address))
    file.with_suffix(".part").replace(file)
    print(f"{SETTINGS['instance']} serves {address}", flush=True)


async def serve_grpc(add: Callable[[Any, Any], None], servicer: object) -> Any:
    import grpc.aio

    from pipelinerl.service.tls import server_credentials

    server = grpc.aio.server()
    add(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(Path(SETTINGS["tls_dir"])))
    await server.start()
    await serve(port)
    return server


def stop_event(kind: str) -> asyncio.Event:
    event = asyncio.Event()
    is_deaf = not {kind, SETTINGS["instance"]}.isdisjoint(FAKE.get("DEAF", "").split(","))
    on_stop = (lambda: print("ignored", flush=True)) if is_deaf else event.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_stop)
    return event


async def verifier() -> int:
    stop = stop_event("verifier")
    grpc = await asyncio.start_server(lambda *_: None, "127.0.0.1", int(SETTINGS.get("grpc_port", "0")))
    await serve(grpc.sockets[0].getsockname()[1])
    await stop.wait()
    return 0


async def actor() -> int:
    if "ACTOR_EXIT" in FAKE and FAKE.get("ONLY_ACTOR", SETTINGS["instance"]) == SETTINGS["instance"]:
        print("WARNING of something else\nerror: no such model", flush=True)
        return int(FAKE["ACTOR_EXIT"])
    from pipelinerl.v1 import actor_pb2, actor_pb2_grpc

    class Actor(actor_pb2_grpc.ActorServiceServicer):
        async def GetState(self, request: object, context: object) -> actor_pb2.ActorState:
            phase = actor_pb2.ACTOR_PHASE_SERVING
            return actor_pb2.ActorState(instance="actor-0", phase=phase, policy_version=3, sequences_in_progress=64)

    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
    subprocess.Popen(sleeps, process_group=0)  # as vLLM's engine core
    stop = stop_event("actor")
    server = await serve_grpc(actor_pb2_grpc.add_ActorServiceServicer_to_server, Actor())
    await stop.wait()
    await server.stop(None)
    return 0


def write_checkpoint(run_dir: Path, recipe: dict[str, Any], version: int) -> None:
    from pipelinerl.run_dir import STATE_FORMAT

    folder = run_dir / "checkpoints" / f"step-{version}" / "resume"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": STATE_FORMAT, "policy_version": version, "journal_bytes": 0, "recipe": recipe}
    (folder / "run.json").write_text(json.dumps(content))


def records_to_go_on_from(run_dir: Path) -> list[dict[str, Any]]:
    """Notes this start in lineage.json, and cuts metrics.jsonl to the newest checkpoint."""
    versions = [int(folder.name.removeprefix("step-")) for folder in run_dir.glob("checkpoints/step-*")]
    version, lineage, metrics = max(versions, default=0), run_dir / "lineage.json", run_dir / "metrics.jsonl"
    starts = json.loads(lineage.read_text())["starts"] if lineage.is_file() else []
    lineage.write_text(json.dumps({"starts": [*starts, version]}))
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    metrics.write_text("".join(lines[:version]))
    return [json.loads(line) for line in lines[:version]]


async def trainer() -> int:
    from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc

    run_dir, recipe = Path(SETTINGS["run_dir"]), yaml.safe_load(Path(SETTINGS["recipe"]).read_text())
    total, records = recipe["trainer"]["steps"], records_to_go_on_from(run_dir)
    begun, stop, step_s = len(records), stop_event("trainer"), float(FAKE.get("STEP_S", "0.05"))

    class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
        async def GetStatus(self, request: object, context: object) -> trainer_pb2.TrainerStatus:
            phase = trainer_pb2.TRAINER_PHASE_TRAINING
            failures = {"reward_crashed": "reward_crashed: KeyError at my_rewards.py:4\x1b[2J"} if len(records) > 15 else {}
            return trainer_pb2.TrainerStatus(phase=phase, total_steps=total, policy_version=len(records), failures=failures)

        async def StreamMetrics(self, request: trainer_pb2.StreamMetricsRequest, context: object) -> object:
            sent = 0
            while True:
                for record in records[sent:]:
                    sent += 1
                    if record["step"] >= request.from_step:
                        yield trainer_pb2.StepMetrics(step=record["step"], json=json.dumps(record))
                await asyncio.sleep(0.02)

    server = await serve_grpc(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, Trainer())
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        for step in range(begun + 1, total + 1):
            if str(step) == FAKE.get("CRASH_AT_STEP"):
                print("ZeroDivisionError: in the loss", flush=True)
                return int(FAKE.get("EXIT_CODE", "1"))
            record = {"step": step, "policy_version": step, "time_s": step * step_s, "reward_mean": step / total}
            record |= {"from": begun, "largest_lag": 2, "max_lag_too_small": step > 9}
            record |= {"clip_range_cut": 0.41 if step > 30 else None, "equal_reward_groups": float(step > 30)}
            print(json.dumps(record), file=metrics, flush=True)
            records.append(record)
            if "CHECKPOINT_EVERY" in FAKE and step % int(FAKE["CHECKPOINT_EVERY"]) == 0:
                write_checkpoint(run_dir, recipe, step)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), step_s)
            while str(step) in PAUSES and not stop.is_set() and not (run_dir / f"go-on-{step}").exists():
                await asyncio.sleep(0.02)
            if stop.is_set():
                break
    await server.stop(None)
    if "SLOW_CHECKPOINT" in FAKE:
        partial = run_dir / "checkpoints" / f".step-{len(records)}.partial-{os.getpid()}"
        partial.mkdir(parents=True)
        (partial / "weights").write_bytes(b"1234")
        while not (run_dir / "go-on-checkpoint").exists():
            await asyncio.sleep(0.02)
        shutil.rmtree(partial)
    write_checkpoint(run_dir, recipe, len(records))
    summary = {
        "steps": len(records), "model_dir": SETTINGS["model_dir"], "by": "trainer",
        "begun": begun, "interrupted": len(records) < total, "expected_actors": int(SETTINGS["expected_actors"]),
    }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return 0


async def model() -> int:
    from pipelinerl.initial_model import built_folder, filling
    from pipelinerl.recipe.loading import load_recipe

    recipe, this = load_recipe(SETTINGS["recipe"]), asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    with filling(built_folder(recipe, SETTINGS["run"], Path(SETTINGS["model_cache"]))) as beside:
        print("INFO initial model: step 1 of 2", flush=True)
        while "model" in PAUSES and not Path(SETTINGS["recipe"]).with_name("go-on-model").exists():
            await asyncio.sleep(0.02)
        (beside / "config.json").write_text(recipe.model.model_dump_json())
    return 0


if __name__ == "__main__":
    kinds = {"verifier": verifier, "actor": actor, "trainer": trainer, "model": model}
    sys.exit(asyncio.run(kinds[sys.argv[1]]()))
