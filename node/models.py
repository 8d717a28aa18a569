"""The frozen base model as a local folder: made, found on disk, or fetched from the Hub at its revision.

Two peers that resolve the same pinned ModelSpec have the same weights, config and tokenizer, or are told
which of them differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import errors, snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP client in use
from safetensors import safe_open

from protocol.errors import OperatorError
from protocol.runspec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TINY = "builtin:tiny"
TINY_REF = re.compile(rf"^{TINY}(?:-(\d{{1,9}}))?$")
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*")
"""Second copies of the weights that some repositories hold."""

NOT_THE_MODEL = ("transformers_version", "_name_or_path", "_from_model_config")
"""Config keys that say who wrote the file, and differ between equal models."""

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A base model that lies on this machine, whole."""

    directory: Path
    revision: str
    """Commit of a hub model, sha256 of the weights of any other."""
    config_digest: str
    tokenizer_digest: str
    vocab_size: int
    context_tokens: int


def resolve_model(
    spec: ModelSpec, cache_dir: Path, *, base_dir: Path = Path(), endpoint: str | None = None
) -> LocalModel:
    """Find, make or fetch the model, and compare it with what the spec pins.

    Slow (downloads, hashes): call it off the event loop. ``builtin:tiny`` goes to ``cache_dir``, hub models
    to the Hub's own cache; a relative path starts at ``base_dir``; ``endpoint`` is another Hub. Raises
    OperatorError.
    """
    directory, commit = _locate(spec, cache_dir, base_dir, endpoint)
    if not any(directory.glob("*.safetensors")) or not (directory / "config.json").is_file():
        raise OperatorError(f"model.ref {spec.ref}: no config.json and *.safetensors in {directory}")
    config = _read_json(directory / "config.json")
    model = LocalModel(
        directory=directory,
        revision=commit or _files_digest(directory, WEIGHT_FILES),
        config_digest=_config_digest(directory),
        tokenizer_digest=_files_digest(directory, TOKENIZER_FILES),
        vocab_size=_setting(config, ("vocab_size",), directory),
        context_tokens=_setting(config, CONTEXT_KEYS, directory),
    )
    if commit is None:
        _compare(spec, model, "revision", "weights")
    _compare(spec, model, "config_digest", "config")
    _compare(spec, model, "tokenizer_digest", "tokenizer")
    return model


def pin(
    spec: ModelSpec, cache_dir: Path, *, base_dir: Path = Path(), endpoint: str | None = None
) -> ModelSpec:
    """The same spec with revision and digests as this machine sees them. Raises like ``resolve_model``."""
    return pinned(spec, resolve_model(spec, cache_dir, base_dir=base_dir, endpoint=endpoint))


def pinned(spec: ModelSpec, model: LocalModel) -> ModelSpec:
    """The same spec with revision and digests of the model that was found for it."""
    return spec.model_copy(
        update={
            "revision": model.revision,
            "config_digest": model.config_digest,
            "tokenizer_digest": model.tokenizer_digest,
        }
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises OperatorError if the folder has none that can be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as exc:
        raise OperatorError(f"no tokenizer can be read from {directory}: {_first_line(exc)}") from exc
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def weight_names(directory: Path) -> set[str]:
    """Names of all tensors in the model's safetensors files; reads their headers only."""
    names: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names.update(file.keys())
    return names


class Detokenizer:
    """Token ids to the text that rewards see: special tokens are left out, nothing else is changed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def stop_token_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a completion, sorted: what generation config, config and tokenizer call EOS.

    Raises OperatorError if there is none: such a model would never stop.
    """
    found: set[int] = set()
    for name in CONFIG_FILES:
        if (directory / name).is_file():
            value = _read_json(directory / name).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or [])
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    if not found:
        raise OperatorError(f"{directory} names no EOS token: completions would never end")
    return tuple(sorted(found))


def _locate(
    spec: ModelSpec, cache_dir: Path, base_dir: Path, endpoint: str | None
) -> tuple[Path, str | None]:
    """The folder, and its commit if it comes from the Hub."""
    if tiny := TINY_REF.match(spec.ref):
        from node.tiny_model import tiny_model

        return tiny_model(cache_dir, int(tiny[1] or 0)), None
    if spec.ref.startswith((".", "/", "~")) or (base_dir / spec.ref).is_dir():
        return base_dir / Path(spec.ref).expanduser(), None
    snapshot = _fetch(spec.ref, spec.revision, endpoint)
    return snapshot, snapshot.name


def _fetch(ref: str, revision: str | None, endpoint: str | None) -> Path:
    """The snapshot folder, whose name is the commit; from the cache alone if the Hub cannot be reached."""
    if not HUB_ID.match(ref):
        raise OperatorError(
            f"model.ref {ref!r} is no model; write {TINY}, a directory (./mine) or a hub id (owner/name)"
        )
    try:
        snapshot = snapshot_download(
            ref,
            revision=revision,
            endpoint=endpoint,
            allow_patterns=[*WEIGHT_FILES, *CONFIG_FILES, *TOKENIZER_FILES],
            ignore_patterns=list(OTHER_FORMATS),
        )
    except errors.GatedRepoError as exc:
        raise OperatorError(
            f"model {ref} is gated: accept its terms on its page, then `hf auth login`"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise OperatorError(
            f"the Hub has no model {ref}; check the spelling, or `hf auth login` if it is private"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise OperatorError(f"model {ref} has no revision {revision}: check model.revision") from exc
    except errors.LocalEntryNotFoundError as exc:
        raise OperatorError(f"model {ref} is not on this machine and the Hub cannot be reached") from exc
    except (errors.RevisionResolutionError, HTTPError, OSError, ValueError) as exc:
        raise OperatorError(f"model {ref} cannot be fetched: {_first_line(exc)}") from exc
    return Path(str(snapshot))


def _compare(spec: ModelSpec, model: LocalModel, field: str, what: str) -> None:
    wanted, here = getattr(spec, field), getattr(model, field)
    if wanted not in (None, here):
        raise OperatorError(
            f"model {spec.ref}: the {what} in {model.directory} is not the run's: {field} is {here} here, "
            f"{wanted} in the run; copy the folder from the machine that created the run"
        )


def _config_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in CONFIG_FILES:
        if (directory / name).is_file():
            config = {k: v for k, v in _read_json(directory / name).items() if k not in NOT_THE_MODEL}
            digest.update(f"{name}{json.dumps(config, sort_keys=True)}".encode())
    return digest.hexdigest()


def _files_digest(directory: Path, patterns: Iterable[str]) -> str:
    """sha256 over names and contents of the files that match, in sorted order."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}):
        with path.open("rb") as file:
            digest.update(f"{path.name}{hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()


def _setting(config: Mapping[str, Any], names: Iterable[str], directory: Path) -> int:
    """The first of ``names`` in the config, or in its text part if the model also sees."""
    text = config.get("text_config", {})
    for name in names:
        value = config.get(name, text.get(name))
        if isinstance(value, int):
            return value
    raise OperatorError(f"{directory}/config.json has no {' or '.join(names)}: this model cannot be used")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as exc:
        raise OperatorError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise OperatorError(f"{path} is not a JSON object")
    return content


def _first_line(exc: Exception) -> str:
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]
