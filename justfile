# Everything a contributor runs. `just` alone lists it. Paths are relative to this file.

set positional-arguments := true

export OMP_NUM_THREADS := env("OMP_NUM_THREADS", "1")
export TOKENIZERS_PARALLELISM := "false"

bin := justfile_directory() / ".venv" / "bin"

_list:
    @'{{ just_executable() }}' --list --unsorted

# Make .venv and install everything into it; no work when nothing changed.
setup:
    @sh scripts/setup.sh

# Watch a whole swarm learn on this machine: no account, no download, no GPU (a few minutes).
demo *args: setup
    @'{{ bin }}/grpo-node' demo "$@"

# The fast tests, on two cores: under three minutes.
test *args: setup
    @'{{ bin }}/python' -m pytest -n 2 -m "not slow and not e2e and not vllm" "$@"

# The slower ones of them: hostile peers, jobs, faults of the Hub, planted bugs (minutes).
slow *args: setup
    @'{{ bin }}/python' -m pytest -n 2 -m "slow and not e2e and not vllm" "$@"

# What no test should have to say: lint, format, types, direction, house rules.
check: setup
    '{{ bin }}/ruff' check .
    '{{ bin }}/ruff' format --check .
    '{{ bin }}/mypy'
    '{{ bin }}/lint-imports' --no-logo
    '{{ bin }}/python' -m pytest tests/test_tidy.py

# A swarm in bad weather under virtual time: 200 seeds; `just sim --seed N` replays one.
sim *args: setup
    @'{{ bin }}/python' -m tests.sim "$@"

# Real processes and a real broker, one after the other (minutes).
e2e *args: setup
    @'{{ bin }}/python' -m pytest -m e2e "$@"

# vLLM itself, on this machine's CPU, in an environment of its own (3.5 GB; then about five minutes).
test-vllm *args: setup
    @sh scripts/setup-vllm.sh
    @'{{ bin }}/python' -m pytest -m vllm "$@"

# Measure one question: `just bench codec`; without a name, list them.
bench *args: setup
    @'{{ bin }}/python' -m bench "$@"
