"""What the refusals of object stores mean, in the words of a person who looks for the cause. Pure."""

from __future__ import annotations

import errno
import re

from xla_ckpt.storage.schemes import SCHEMES

_STATUS = re.compile(r"status code: (\d+ [A-Z][A-Za-z -]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_BODY = re.compile(r"status code: 404 [A-Za-z ]*: *\S")
_REQUEST = re.compile(r"performing ([A-Z]+) (\S+)")
_ENDPOINT = re.compile(r"https?://[^/\s]+")
_TRIED = re.compile(r" in ([\d.]+)s\b")

_REGION = "the bucket is in another region: set AWS_REGION to that one"

_REFUSED = "the credentials are refused: they are wrong, have expired, or may not be used from here"

_MEANINGS = {
    "NoSuchBucket": (errno.ENODEV, "there is no such bucket: make it first, or correct its name"),
    "ContainerNotFound": (errno.ENODEV, "there is no such container: make it first, or correct its name"),
    "InvalidAccessKeyId": (
        errno.EACCES,
        "the access key is not known there: look at it, and at the endpoint",
    ),
    "AuthenticationFailed": (errno.EACCES, _REFUSED),  # of Azure's
    "AuthorizationFailure": (errno.EACCES, _REFUSED),
    "SignatureDoesNotMatch": (errno.EACCES, "the secret key does not fit to the access key: set both anew"),
    "ExpiredToken": (errno.EACCES, "the credentials have expired: get new ones, and start again"),
    "InvalidToken": (errno.EACCES, "the session token does not fit to the access key: set all three anew"),
    "RequestTimeTooSkewed": (errno.EACCES, "the clock of this machine differs from that of the store: set it"),
    "PermanentRedirect": (errno.EREMOTE, _REGION),
    "AuthorizationHeaderMalformed": (errno.EREMOTE, _REGION),
    "IllegalLocationConstraintException": (errno.EREMOTE, _REGION),
    "QuotaExceeded": (errno.ENOSPC, "the quota of the bucket is used up"),
    "SlowDown": (errno.EBUSY, "the store had too many requests, for longer than they were repeated"),
}
"""What the codes of stores mean: an error number, and words."""

_NEEDED = {
    "list": "list what lies there (on S3: s3:ListBucket)",
    "GET": "read there (on S3: s3:GetObject; without s3:ListBucket it also says this of a file that is absent)",
    "PUT": "write there (on S3: s3:PutObject)",
    "DELETE": "delete there (on S3: s3:DeleteObject)",
}
"""What a user may not do whose request is refused."""

_NO_CREDENTIALS = "no credentials were found, and this machine has no role. " + ". ".join(
    f"For {scheme.name}://: {scheme.credentials}" for scheme in SCHEMES.values()
)

_ROLES = [path for scheme in SCHEMES.values() for path in scheme.roles]
"""Where the providers' machines have the credentials of their roles."""

NO_STORE = "what answers there is no object store: look at the endpoint (for s3://, AWS_ENDPOINT_URL)"


def os_error(error: BaseException, key: str) -> OSError:
    """The OSError that an error of obstore means.

    >>> os_error(FileNotFoundError("Object at location a not found"), "a")
    FileNotFoundError(2, 'there is no such file')
    """
    text = said_by(error)
    code = next((one or other for one, other in _CODE.findall(text)), "")
    method, url = next(iter(_REQUEST.findall(text)), ("", ""))
    status = next(iter(_STATUS.findall(text)), "")
    number, words = _MEANINGS.get(code, (0, ""))
    if not number:
        number, words = _by_signs(text, method, url, code)
    if not number and isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "there is no such file", key)
    if not number:
        denied = status.startswith(("401", "403")) or code == "AccessDenied"
        number = errno.EACCES if denied else errno.EIO
        if denied:
            words = f"these credentials have no permission to {_NEEDED[_doing(text, method, url)]}"
        else:
            words = f"the store answered {status}" if status else text.partition("\n")[0][:300]
    detail = " ".join(part for part in (status, code) if part)
    kind: type[OSError] = PermissionError if number == errno.EACCES else OSError
    return kind(number, f"{words} ({detail})" if detail and detail not in words else words, key)


def said_by(error: BaseException) -> str:
    """What an error of obstore says. Behind its first lines it repeats them in another form, with bodies escaped."""
    return str(error).partition("Debug source:")[0].rstrip()


def _by_signs(text: str, method: str, url: str, code: str) -> tuple[int, str]:
    """What an answer means that has no code of a store."""
    if any(place in url for place in _ROLES):
        return errno.EACCES, _NO_CREDENTIALS
    if "performing token request" in text and _STATUS.search(text):
        return errno.EACCES, _REFUSED
    if "redirect without LOCATION" in text:
        return errno.EREMOTE, _REGION
    if "error sending request" in text:
        endpoint = next(iter(_ENDPOINT.findall(url)), "the store")
        tried = next(iter(_TRIED.findall(text)), "")
        after = f", tried for {float(tried):.0f} s" if tried else ""
        return errno.EHOSTUNREACH, f"{endpoint} does not answer{after}: look at the endpoint and the network"
    if "non-partial response" in text:
        return errno.EPROTO, "the server sends all of a file where a part is asked for, so that it cannot be read from"
    # Who has no such file says so with a code. A HEAD has no room for one.
    strange = "Header missing from response" in text or "invalid DeleteObjects response" in text
    if strange or (not code and method != "HEAD" and _BODY.search(text)):
        return errno.EPROTO, NO_STORE
    return 0, ""


def _doing(text: str, method: str, url: str) -> str:
    """Which of `_NEEDED` a request was about."""
    if "list-type=" in url or "comp=list" in url or "performing list request" in text:
        return "list"
    if method == "DELETE" or "?delete" in url or "DeleteObjects" in text:
        return "DELETE"
    return "PUT" if method in ("PUT", "POST") else "GET"
