"""The head of a manifest: what `shoal ckpt ls` and a run that resumes want of thousands of manifests.

It is what stands before their tensors. Nothing here imports torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from shoal.sealed import sealed_body, unseal

FORMAT = 1
FILE = "manifest.json"


class NewerFormat(ValueError):
    """A manifest that a later version has written: nothing is wrong with it."""


@dataclass(frozen=True)
class Head:
    """What a manifest says before its tensors."""

    name: str
    step: int
    written: str
    plan: str
    workers: int
    keep: str
    """The retention that it was saved under and goes by; empty where somebody has asked for it by name."""
    nbytes: int
    """Of its files."""


def read_head(text: bytes) -> Head:
    """The head of a manifest, without a look at its tensors; ValueError, with a reason, for what is none."""
    body = sealed_body(text)
    # No string of JSON has these signs in it: there, a quotation mark follows a backslash.
    first, last = body.find(b',"versions":{'), body.rfind(b',"tensors":{')
    middle = body.rfind(b',"files":{', first, last)
    if 0 < first < middle < last and body.find(b',"state":{', first, middle) > 0:
        try:
            short = {**json.loads(body[:first] + b"}"), **json.loads(b"{" + body[middle + 1 : last] + b"}")}
            return head_of({"state": {}, "tensors": {}, **short})
        except (
            ValueError,
            RecursionError,
        ):  # another order than ours, or not to be believed: all of it will tell
            pass
    return head_of(unseal(text))


def head_of(body: object) -> Head:
    """Check what every manifest has; ValueError, with a reason, where it has not."""
    if not isinstance(body, dict):
        raise ValueError(f"it holds a {type(body).__name__}, and a manifest is an object")
    if body.get("format") != FORMAT:
        found = body.get("format")
        text = f"it has format {found}, and this version of shoal reads {FORMAT}"
        raise NewerFormat(text) if isinstance(found, int) and found > FORMAT else ValueError(text)
    missing = [
        key for key in ("name", "step", "written", "plan", "workers", "files", "tensors") if key not in body
    ]
    if missing:
        raise ValueError(f"an entry is missing or of the wrong kind ('{missing[0]}')")
    step = body["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"its step is {step!r}, and steps are counted from 0")
    for key in ("state", "files", "tensors"):
        if not isinstance(body.get(key), dict):
            raise ValueError(f"an entry is missing or of the wrong kind ('{key}')")
    try:
        nbytes = sum(int(facts["bytes"]) for facts in body["files"].values())
        workers = int(body["workers"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"an entry is missing or of the wrong kind ({error})") from error
    written, plan = str(body["written"]), str(body["plan"])
    return Head(str(body["name"]), step, written, plan, workers, str(body.get("keep", "")), nbytes)
