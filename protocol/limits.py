"""A limit on everything that a peer may send or ask for, with what breaks if it changes."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""First token of every subject after ``grpo``; a new wire format means a new number."""

FRAME_BYTES_MAX = 64 << 20
"""Largest frame a decoder looks at. Groups of 64 rollouts with 32k tokens are 16 MB."""

ENVELOPE_BYTES_MAX = 128 << 10
"""Largest envelope of a frame (kind, signer, lengths of arrays), parsed before the signature is checked."""

BODY_BYTES_MAX = 512 << 10
"""Largest JSON body in a frame; arrays are outside it. Raising it lets a peer cost more parsing."""

ARRAYS_MAX = 4096
"""Arrays in one frame; a group of the largest size has 769. All their lengths fit an envelope."""

COUNT_MAX = (1 << 53) - 1
"""Largest count in a message: exact in float64 and in every JSON reader, so arithmetic cannot overflow."""

INLINE_BYTES_MAX = 256 << 10
"""Messages above this travel by reference through the Object Store (NATS prefers small messages)."""

GROUP_SIZE_MAX = 256
"""Rollouts of one task; bounds the memory of an engine's batch."""

PROMPT_TOKENS_MAX = 1 << 20
COMPLETION_TOKENS_MAX = 1 << 20
"""Tokens of one prompt and of one completion; far above any engine, so that bad lengths fail early."""

ARRAY_NUMBERS_MAX = max(PROMPT_TOKENS_MAX, COMPLETION_TOKENS_MAX)
"""Numbers in one array of token ids or log-probabilities."""

LEARNERS_MAX = 256
"""Learners a clock may name; clocks travel in every group."""

NAME_MAX = 48
"""Characters in the name of a run or a node: they are tokens of subjects, keys and paths."""

BATCH_WRITES_MAX = 900
"""Writes of one atomic commit; nats-server refuses batches above 1000."""

EVENT_BYTES_MAX = 32 << 10
"""One telemetry event; larger ones are cut by their author."""

DONE_TTL_S = 24 * 3600
"""How long a consumed group is remembered in KV. Must exceed the longest possible redelivery."""

QUEUE_MESSAGES_MAX = 10_000
"""Messages in one work queue; publishers of more are told BackPressure. Bounds the broker's disk."""

DEDUPE_WINDOW_S = 120
"""How long a queue recognises a resent ``message_id``. An optimisation: a broker restart forgets some."""

SAMPLER_MESSAGES_MAX = 128
"""Messages of one sampler in the rollout queue. A sampler that verifiers do not keep up with waits; one that
floods the queue delays its peers by what verifiers reject of so many messages."""

SAMPLER_PAYLOADS_MAX = 64
"""Payloads by reference that one sampler may have in the Object Store: its share of the broker's disk is this
times ``FRAME_BYTES_MAX``. More wait."""

NODE_BYTES_MAX = 64 << 10
"""One node's presence; every peer reads all of them."""

TOLD_BYTES_MAX = 64 << 10
"""What a task tells a simulated user of its row, as JSON. It is part of the body."""

TASK_ROWS_MAX = 1 << 24
"""Rows that a run may ask for; generated task sets make them one by one."""

ARGUMENTS_BYTES_MAX = 16 << 10
ARGUMENTS_DEPTH_MAX = 8
"""A run's arguments of its environment, as JSON: every peer reads them, and none needs a longer table."""
