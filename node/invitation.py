"""An invitation: one word that says where a broker is, which run, and by what login somebody may join.

Whoever has it can log in, so it is handed over like a password. It is text, and nothing in it is executed.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from node.broker_access import BrokerAccess
from node.nats_jwt import credentials_text
from node.private_file import write_private
from protocol.errors import OperatorError
from protocol.spec import Name, first_fault

WORD = "grpo1:"
"""Begins every invitation; another form gets another number."""
WORD_CHARS_MAX = 16 << 10
FORM_BYTES_MAX = 32 << 10
CREDENTIALS_FILE = "invitation.creds"


def _one_line(text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise ValueError("not printable ASCII")
    return text


Line = Annotated[str, Field(max_length=8192), AfterValidator(_one_line)]


class Invitation(BaseModel):
    """What an invitation says; secrets never show in ``repr``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: Line
    """Where nodes reach the broker."""
    run: Name
    roles: Annotated[tuple[Line, ...], Field(strict=False, min_length=1, max_length=3)]
    nodes: Annotated[tuple[Name, ...], Field(strict=False, min_length=1, max_length=64)]
    """Names that may be used; more than one for a household behind a leaf node."""
    core: Name | Line | None = None
    """Name under which the login's account imports the streams."""
    jwt: Annotated[Line | None, Field(repr=False)] = None
    seed: Annotated[Line | None, Field(repr=False)] = None
    token: Annotated[Line | None, Field(repr=False)] = None
    """In place of ``jwt`` and ``seed``: the token of a household's own broker."""

    def word(self) -> str:
        """The invitation as one word, for a command line."""
        packed = zlib.compress(self.model_dump_json(exclude_none=True).encode(), 9)
        return WORD + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @classmethod
    def parse(cls, word: str) -> Invitation:
        """Raises OperatorError on anything but an invitation."""
        try:
            if not word.startswith(WORD) or len(word) > WORD_CHARS_MAX:
                raise ValueError("it begins otherwise or is too long")
            text = word.removeprefix(WORD)
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            form = zlib.decompressobj().decompress(packed, FORM_BYTES_MAX)
            return cls.model_validate_json(form)
        except ValidationError as exc:
            raise OperatorError(f"--join: the invitation is damaged: {first_fault(exc)}") from exc
        except (ValueError, binascii.Error, zlib.error) as exc:
            raise OperatorError(
                f"--join: not an invitation; copy the whole word that `grpo-node invite` printed ({WORD}…)"
            ) from exc

    def save(self, home: Path) -> Path | None:
        """Keep the login in ``home``, where a running node finds it at its next connection: an invitation
        that replaces one that ran out needs no restart. None if there is nothing to keep."""
        if self.jwt is None or self.seed is None:
            return None
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = home / CREDENTIALS_FILE
        write_private(file, credentials_text(self.jwt, self.seed))
        return file

    def access(self, credentials: Path | None) -> BrokerAccess:
        """How to reach the broker with the login kept in ``credentials``."""
        return BrokerAccess(self.url, token=self.token, credentials=credentials, core=self.core)
