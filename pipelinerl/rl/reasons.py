"""Why a sequence ended without being trained on, in a sentence for each reason of the ledger.

What people read shows them: the report, the live page, the end of `pipelinerl run`. docs/errors.md has the same words.
"""

from __future__ import annotations

from pipelinerl.rl.groups import StaleReason

MEANINGS = {
    "reward_timeout": "the reward ran past reward.timeout_s; its worker was killed",
    "reward_crashed": "the reward raised, or its process died twice on this item",
    "reward_out_of_memory": "the reward ran past reward.memory_mib",
    "reward_bad_reward": "the reward is not a finite number",
    "reward_bad_reference": "the problem's reference lacks what the scorer needs",
    "reward_unknown_task": "the verifier serves another task",
    "episode_timeout": "the episode ran past task.episode_timeout_s, or its environment past task.answer_timeout_s",
    "episode_crashed": "the environment or agent raised, died, or did not end well, which was not the policy's fault",
    "episode_out_of_memory": "the episode ran past reward.memory_mib",
    "episode_bad_reward": "the episode's reward is not a finite number",
    "episode_bad_reference": "the problem's reference lacks what the episode needs",
    "episode_unknown_task": "the verifier serves another task",
    "turn_timeout": "no turn within task.turn_timeout_s",
    "unknown_task": "an episode of a task that the actor's recipe does not have: give it the trainer's recipe",
    "no_turns": "the environment or agent ended without asking for a turn",
    "verifier_refused": "the verifier refused the call, or died five times while the episode's environment was running",
    "empty_completion": "the completion has no token",
    "non_finite_logprobs": "vLLM reported a log-probability that is not finite",
    "version_spans": "vLLM's version spans do not cover the tokens",
    "prompt_too_long": "the prompt leaves no room in the context",
    "engine": "vLLM refused or failed this request",
    "invalid": "the finished sequence fails its own checks",
    "too_large": "the sequence is larger than NATS's max_payload",
    "redelivered_too_often": "the group was delivered more than five times, and is kept as a dead letter",
    "unreadable_group": "the prompt group does not hold together, but names its samples",
    "forged": "a message without the token of its group took the id of this sequence",
    "actor_quarantined": "its actor's log-probabilities are not those of the policy that it names (weights.verify_logprobs)",
    "prompt too long": "the prompt leaves no room in the context; it was never sent out",
    "prompt group too large": "the prompt group is larger than NATS's max_payload; it was never sent out",
    "prompt group invalid": "the prompt group is no valid message, such as one with an empty prompt; it was never sent out",
    "prompt group lost": "the group left the queue, and this sample of it never came",
    "unreadable": "the message does not parse or contradicts itself, but its id is known",
    "contradicts its group": "the sequence has another group size than was issued",
    "longer than the context": "prompt and completion exceed model.max_context",
    "token outside the vocabulary": "the completion has a token that the model does not have",
    "step skipped": "the loss or gradient of its batch was not finite; the step changed no weight",
    "group incomplete": "this sample is good, but too few of its group are for the baseline",
    StaleReason.LAG.value: "its oldest token, or its mean, had more lag than algorithm.max_lag allows",
    StaleReason.UNDONE.value: "some of its tokens are of a version that a restart of the trainer undid",
    StaleReason.UNKNOWN.value: "some of its tokens are of a version that this run has not made yet",
    "equal rewards": "all answers of the group were equally right, so that there is nothing to learn from them",
}
