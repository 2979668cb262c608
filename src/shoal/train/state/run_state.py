"""The state of a run, between what each worker holds of it and the logical tensors of a checkpoint.

    parameter/NAME        whole, or the rows, slices and parts that are here
    buffer/NAME           as the first replica has it
    buffer@3/NAME         as replica 3 has it, where it differs: statistics of its own samples
    optimizer/KEY/NAME    numbers per element are cut like the parameter; others belong to it as a whole
    warm@3/NAME           what worker 3 has found out and would find again
    KIND/NAME             what else an exchange keeps, all replicas the same; KIND@3/NAME: as replica 3 has it
    ema/NAME, prune-mask/NAME  what recipes keep of each element of a parameter
    rows/NAME/COLUMN      of a SparseEmbedding: id, values, state, step and clock of every row, by ascending ids

A weight that several stages hold is one weight, under its first name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import nn

from shoal.checkpoint.large_tensors import Piece
from shoal.checkpoint.layout.manifest import Manifest
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import check_type
from shoal.checkpoint.layout.write_plan import Holding
from shoal.checkpoint.load import Reader
from shoal.checkpoint.save import State
from shoal.errors import ConfigError
from shoal.exchange.contract import LocalShard
from shoal.exchange.row_tables import RowPiece
from shoal.optimizer import state_bytes
from shoal.train.model.whole_model import Whole

Holdings = dict[tuple[str, int, int, torch.dtype], Holding]
"""What has been worked out before: training waits while it is collected, and it is most often the same."""

_AT_ONCE = 8 * 2**20
"""Bytes of rows that are read at a time."""


def check_types(whole: Whole) -> None:
    """Refuse now what could not be saved after hours of training."""
    named = [(held.name, held.tensor) for held in whole.exchange.parameter_shards()] + list(
        whole.buffers().items()
    )
    for name, tensor in named:
        check_type(name, tensor.dtype)


def expected_bytes(whole: Whole) -> int:
    """About how many bytes a checkpoint takes, before there is any state of the optimizer."""
    optimizer = whole.exchange.optimizer
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    given = {key: value for key, value in optimizer.defaults.items() if key in known}
    like = nn.Parameter(torch.zeros(2, 3, device="cpu"))
    try:
        each = state_bytes(lambda params: kind(params, **given), {"like": like})["like"].each / like.itemsize
    except Exception:  # one of the user's own, which is made in another way
        each = 0
    parameters = {held.name: held.tensor.itemsize for held in whole.exchange.parameter_shards()}
    size = 0.0
    for name, shape in whole.shape.sizes.items():
        learns = name in whole.shape.parameters
        size += math.prod(shape) * parameters.get(name, 4) * (1 + each if learns else 1)
    return int(size)


def collect(whole: Whole, holdings: Holdings) -> State:
    """What this worker holds, and where it belongs. Every rank calls it."""
    whole.exchange.prepare_save()
    return [
        *_parameters(whole, holdings),
        *_optimizer(whole, holdings),
        *_buffers(whole),
        *_owned(whole, holdings),
    ]


def collect_rows(whole: Whole) -> Iterator[Piece]:
    """The rows of every SparseEmbedding, as they come."""
    for name, columns in whole.exchange.tables.pieces():
        yield f"rows/{name}", columns


def restore(whole: Whole, reader: Reader) -> None:
    """Take over what belongs here of a checkpoint, or say which name does not fit."""
    paths = _check_names(whole, reader)
    with torch.no_grad():
        for held in whole.exchange.parameter_shards():
            reader.read_into(paths[whole.first(held.name)], whole.region(held), held.tensor)
        data, alike = whole.mesh.data, reader.manifest.state.get("replicas") == whole.mesh.data.size
        for name, buffer in whole.buffers().items():
            own = f"buffer@{data.rank}/{name}"
            path = own if alike and own in reader.manifest.tensors else paths[name]
            reader.read_into(path, Region.whole(buffer.shape), buffer)


def restore_optimizer(whole: Whole, reader: Reader) -> None:
    """Take over what belongs here of the optimizer's state."""
    exchange, stored = whole.exchange, _optimizer_entries(reader.manifest)
    each = _per_element(whole, reader.manifest, stored)
    for target in exchange.optimizer_shards():
        entries = stored.get(whole.first(target.name))
        if entries is None:
            continue
        size, mine = whole.shape.sizes[whole.first(target.name)], {}
        for key, path in entries.items():
            if key in each and reader.manifest.tensors[path].shape == tuple(size):
                part = reader.read(path, whole.region(target)).view(target.tensor.shape)
                mine[key] = _like(part, target.tensor, reader.manifest, whole.first(target.name))
            else:
                mine[key] = reader.read(path)
        exchange.optimizer.state[target.tensor] = mine


def restore_rows(whole: Whole, reader: Reader) -> None:
    """Take over the rows of every SparseEmbedding; one that the checkpoint does not know begins anew."""
    stored: dict[str, dict[str, str]] = {}
    for path in reader.manifest.tensors:
        if path.startswith("rows/"):
            name, _, column = path.removeprefix("rows/").rpartition("/")
            stored.setdefault(name, {})[column] = path
    for name in stored:
        if name not in whole.exchange.tables.names:
            raise ConfigError(
                f"the rows of '{name}' are only in {reader.folder}; the checkpoint is of another model."
            )
    if stored:
        pieces = (piece for name, paths in stored.items() for piece in _row_pieces(reader, name, paths))
        whole.exchange.tables.load(reader.manifest.step, pieces)


def _row_pieces(reader: Reader, name: str, paths: Mapping[str, str]) -> Iterator[RowPiece]:
    tensors = {column: reader.manifest.tensors[path] for column, path in paths.items()}
    count = tensors["id"].shape[0]
    step = max(1, _AT_ONCE * count // max(1, sum(tensor.nbytes for tensor in tensors.values())))
    for start in range(0, count, step):
        stop, columns = min(start + step, count), {}
        for column, path in paths.items():
            rows, width = tensors[column].shape
            region = Region.whole((rows, width)).within(start * width, stop * width)
            columns[column] = reader.read(path, region).view(-1, width)
        yield name, columns


def restore_owned(whole: Whole, reader: Reader) -> None:
    """Take over what else the exchange keeps; with another number of replicas, a part of what all of them had."""
    stored, state, rank = reader.manifest.tensors, reader.manifest.state, whole.mesh.data.rank
    before, kinds = int(state.get("replicas", 0)), set[str]()
    same = before == whole.mesh.data.size and state.get("holders", 0) == holders(whole)
    for owned in whole.extras(saving=False):
        held, name = owned.held, whole.first(owned.held.name)
        region, mine = whole.region(held), f"{owned.kind}@{rank}/{name}"
        theirs = [f"{owned.kind}@{k}/{name}" for k in range(before) if f"{owned.kind}@{k}/{name}" in stored]
        paths = [f"{owned.kind}/{name}"] if owned.alike else [mine] if same else theirs
        if not paths or paths[0] not in stored:
            continue
        kinds.add(owned.kind)
        sum_ = sum(reader.read(path, region).to(held.tensor.dtype) for path in paths)
        assert isinstance(sum_, torch.Tensor)
        shared = 1 if len(paths) == 1 and (owned.alike or same) else owned.holders or len(paths)
        held.tensor.copy_((sum_ / shared if shared > 1 else sum_).view(held.tensor.shape))
    whole.exchange.loaded(kinds)
    own = f"warm@{whole.mesh.world.rank}/"
    if same_workers(whole, reader.manifest):
        whole.exchange.warm_start(
            {path.removeprefix(own): reader.read(path) for path in stored if path.startswith(own)}
        )


def same_workers(whole: Whole, manifest: Manifest) -> bool:
    """Whether as many workers as then are arranged as they were."""
    state, mesh = manifest.state, whole.mesh
    return bool(
        state.get("replicas") == mesh.data.size
        and state.get("workers") == mesh.world.size
        and state.get("holders", 0) == holders(whole)
    )


def holders(whole: Whole) -> int:
    """How many replicas hold a part of each sum that was not sent yet."""
    return max((owned.holders for owned in whole.exchange.extras(saving=False)), default=0)


def _owned(whole: Whole, holdings: Holdings) -> Iterator[tuple[Holding, torch.Tensor]]:
    for owned in whole.extras(saving=True):
        if owned.held.name not in whole.same:
            kind = owned.kind if owned.alike else f"{owned.kind}@{whole.mesh.data.rank}"
            path, tensor = f"{kind}/{owned.held.name}", owned.held.tensor
            yield _holding(whole, holdings, path, owned.held, tensor), tensor
    for name, tensor in whole.exchange.warm().items():
        path, region = f"warm@{whole.mesh.world.rank}/{name}", Region.whole(tensor.shape)
        yield Holding(path, region, tensor.dtype, shared=False), tensor


def _parameters(whole: Whole, holdings: Holdings) -> Iterator[tuple[Holding, torch.Tensor]]:
    for held in whole.exchange.parameter_shards():
        holding = _holding(whole, holdings, f"parameter/{held.name}", held, held.tensor)
        nothing = holding.region.numel == 0 and Region.whole(holding.region.shape).numel > 0
        if held.name not in whole.same and not nothing:
            yield holding, held.tensor


def _optimizer(whole: Whole, holdings: Holdings) -> Iterator[tuple[Holding, torch.Tensor]]:
    state: Mapping[torch.Tensor, Mapping[str, object]] = whole.exchange.optimizer.state
    for target in whole.exchange.optimizer_shards():
        if target.name in whole.same or target.tensor not in state:
            continue
        for key, given in state[target.tensor].items():
            if given is not None:
                value = (
                    given.detach() if isinstance(given, torch.Tensor) else torch.tensor(given, device="cpu")
                )
                yield _holding(whole, holdings, f"optimizer/{key}/{target.name}", target, value), value


def _holding(whole: Whole, holdings: Holdings, path: str, held: LocalShard, value: torch.Tensor) -> Holding:
    """How a value that belongs to what is held of a parameter is stored."""
    sign = (path, held.start, value.numel(), value.dtype)
    if sign not in holdings:
        each = value.shape == held.tensor.shape and (value.dim() > 0 or value is held.tensor)
        region = whole.region(held) if each else Region.whole(value.shape)
        holdings[sign] = Holding(path, region, value.dtype)
    return holdings[sign]


def _buffers(whole: Whole) -> Iterator[tuple[Holding, torch.Tensor]]:
    """The first replica's buffers; and this one's own, if training has made them different."""
    found, data = whole.buffers(), whole.mesh.data
    for name, buffer in found.items():
        if name in whole.same:
            continue
        yield Holding(f"buffer/{name}", Region.whole(buffer.shape), buffer.dtype, shared=False), buffer
    if data.size == 1 or not whole.shape.buffers:
        return
    sum_ = xxhash.xxh32()
    for buffer in found.values():
        sum_.update(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    sums = data.gather_numbers([float(sum_.intdigest())])[:, 0].tolist()
    if sums[data.rank] != sums[0]:
        for name, buffer in found.items():
            if name in whole.same:
                continue
            region = Region.whole(buffer.shape)
            yield Holding(f"buffer@{data.rank}/{name}", region, buffer.dtype, shared=False), buffer


def _check_names(whole: Whole, reader: Reader) -> dict[str, str]:
    """The path of every tensor of the model; refuses a checkpoint of another one.

    A foreign file does not tell buffers from parameters, and may hold a tied weight under all of its names.
    """
    source, tensors = str(reader.folder), reader.manifest.tensors
    paths = {p.split("/", 1)[1]: p for p in tensors if p.startswith(("parameter/", "buffer/"))}
    for other, first in whole.shape.others.items():
        if first in paths:
            paths.pop(other, None)
    for name in sorted(whole.shape.sizes.keys() ^ paths.keys()):
        where = "the model" if name in whole.shape.sizes else source
        raise ConfigError(f"'{name}' is only in {where}; the checkpoint {source} is of another model.")
    for name, size in whole.shape.sizes.items():
        stored = tensors[paths[name]].shape
        if stored != tuple(size):
            raise ConfigError(
                f"'{name}' is {list(stored)} in {source} and {list(size)} in the model; "
                "use another checkpoint folder for another model."
            )
    return paths


def _optimizer_entries(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Paths by parameter and key."""
    found: dict[str, dict[str, str]] = {}
    for path in manifest.tensors:
        if path.startswith("optimizer/"):
            _, key, name = path.split("/", 2)
            found.setdefault(name, {})[key] = path
    return found


def _like(part: torch.Tensor, target: torch.Tensor, manifest: Manifest, name: str) -> torch.Tensor:
    """State where its parameter is; and of the new type of its parameter, if that has changed."""
    stored = manifest.tensors.get(f"parameter/{name}")
    changed = stored is not None and stored.dtype != target.dtype and part.is_floating_point()
    return part.to(target.device, target.dtype if changed else part.dtype)


def _per_element(whole: Whole, manifest: Manifest, stored: Mapping[str, Mapping[str, str]]) -> set[str]:
    """The keys with a number per element. Parameters of one number cannot tell: there, all entries look alike."""
    sizes = whole.shape.sizes
    telling = {name: entries for name, entries in stored.items() if name in sizes and len(sizes[name]) > 0}
    if not telling:
        return {key for entries in stored.values() for key in entries} - {"step"}
    return {
        key
        for name, entries in telling.items()
        for key, path in entries.items()
        if manifest.tensors[path].shape == tuple(sizes[name])
    }
