"""What faults of the Hub mean to a store: a missing bucket, a bad token, or something that passes."""

from __future__ import annotations

import errno

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    EntryNotFoundError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from node.hub_client import NoAnswer, wait_s
from protocol.errors import StoreDenied, StoreError, StoreUnavailable, one_line

_UNAUTHORIZED, _FORBIDDEN, _TIMED_OUT, _TOO_MANY, _SERVER = 401, 403, 408, 429, 500
_LOCAL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EMFILE})


class HubBusy(StoreUnavailable):
    """The Hub asks to come back after ``wait_s`` seconds."""

    def __init__(self, text: str, wait_s: float) -> None:
        """``wait_s`` is 0 if it did not say when."""
        super().__init__(text)
        self.wait_s = wait_s


def translated(exc: Exception, api: HfApi, bucket: str) -> StoreError:
    """``exc`` by what the caller should do about it. May ask the Hub who this is, to tell a token that it
    refuses from a bucket that is not there."""
    if isinstance(exc, OfflineModeIsEnabled):
        return StoreDenied("HF_HUB_OFFLINE forbids to use the Hub; unset it, or use another store")
    if isinstance(exc, LocalTokenNotFoundError):
        return _no_token(bucket)
    if isinstance(exc, HfHubHTTPError):
        return _answered(exc, api, bucket)
    if isinstance(exc, NoAnswer):
        return StoreUnavailable(f"the Hub at {api.endpoint} {exc}")
    if isinstance(exc, OSError) and exc.errno in _LOCAL_DISK:
        return StoreUnavailable(f"this machine's copy of bucket {bucket}: {exc.strerror}; free some space")
    return StoreUnavailable(f"the Hub at {api.endpoint} failed: {one_line(str(exc)) or type(exc).__name__}")


def _answered(exc: HfHubHTTPError, api: HfApi, bucket: str) -> StoreError:
    status = exc.response.status_code
    said = one_line(exc.server_message or str(exc))
    if isinstance(exc, BucketBatchError):
        return StoreUnavailable(f"bucket {bucket}: the Hub did not take all files: {said}")
    if isinstance(exc, BucketNotFoundError | RepositoryNotFoundError) or status == _UNAUTHORIZED:
        return _unseen(api, bucket)
    if status == _FORBIDDEN:
        return StoreDenied(
            f"bucket {bucket}: this token may not do that ({said}); use one with the right to write there"
        )
    if status in {_TIMED_OUT, _TOO_MANY} or status >= _SERVER:
        return HubBusy(f"the Hub at {api.endpoint} answered {status}: {said}", wait_s(exc))
    if isinstance(exc, EntryNotFoundError):
        return StoreUnavailable(f"bucket {bucket}: a file went away meanwhile")
    return StoreDenied(f"bucket {bucket}: the Hub at {api.endpoint} refused ({status}): {said}")


def _unseen(api: HfApi, bucket: str) -> StoreError:
    """A bucket that is not there, or not for this token."""
    token = api.token or get_token()
    if not token:
        return _no_token(bucket)
    try:
        user = api.whoami(token=token)["name"]
    except HfHubHTTPError as exc:
        if exc.response.status_code in {_UNAUTHORIZED, _FORBIDDEN}:
            return StoreDenied(
                f"bucket {bucket}: the Hub refuses this token, it has expired or is wrong; "
                "run `hf auth login`, or set HF_TOKEN"
            )
        return StoreUnavailable(f"the Hub at {api.endpoint} answered {exc.response.status_code}")
    except (httpx2.HTTPError, OSError, ValueError) as exc:
        return StoreUnavailable(f"the Hub at {api.endpoint} failed: {one_line(str(exc))}")
    return StoreDenied(
        f"there is no bucket {bucket} that {user} may see; create it with `grpo-node create RUN.toml "
        "--create-bucket`, or check the store's URL and the token's rights"
    )


def _no_token(bucket: str) -> StoreDenied:
    return StoreDenied(
        f"bucket {bucket}: it is private or does not exist, and this machine has no token; "
        "run `hf auth login`, or set HF_TOKEN"
    )
