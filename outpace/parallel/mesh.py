"""The process groups of one engine: tensor, expert, data and pipeline parallel."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from outpace.config import InferenceConfig, LLMConfig
from outpace.config.rules import num_ranks
from outpace.config.sections import MoEConfig, TensorParallelConfig
from outpace.errors import ConfigError, OutpaceError, StateError
from outpace.log import chosen
from outpace.parallel import rendezvous
from outpace.parallel.group import ALONE, Group
from outpace.parallel.pipeline import ONLY, Stage, stage_of

Result = TypeVar("Result")

_MPU = ("get_tensor_model_parallel_group", "get_model_parallel_group")
BACKENDS: Mapping[str, str] = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
STARTED_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for every rank."""
_OF_LLM = "outpace/ranks of LLM"


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups of one rank."""

    tp: Group = ALONE
    """Tensor parallel: ranks that share each layer."""
    ep: Group = ALONE
    """Expert parallel: consecutive ranks that share the experts."""
    expert_tp: Group = ALONE
    """Ranks that hold the same experts and share each of them."""
    dp: Group = ALONE
    """Data parallel: ranks with the same weights and other requests."""
    stage: Stage = ONLY
    """The pipeline stage: which layers this rank has."""

    @property
    def first(self) -> bool:
        """Whether this rank does the work that is done once, such as writing files."""
        return self.tp.rank == self.ep.rank == self.dp.rank == self.stage.peers.rank == 0

    @property
    def experts_like_layers(self) -> bool:
        """Whether expert group and tensor parallel group are the same ranks, and so have the same tokens."""
        return self.tp.ranks == self.ep.ranks

    @property
    def together(self) -> Group:
        """The group of ranks that must make the same calls."""
        return self.tp if self.stage is ONLY else self.stage.everyone

    @property
    def local(self) -> int:
        """Number of ranks on this machine, this one included."""
        if self is NO_MESH or not dist.is_initialized():
            return 1
        return _local_of_llm() or int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))

    def everywhere(self, good: bool, device: torch.device) -> bool:
        """Whether a condition holds on all ranks; synchronizes the ranks."""
        return bool(self.least(int(good), device))

    def least(self, number: int, device: torch.device) -> int:
        """The minimum over all ranks; synchronizes the ranks."""
        for group in (self.tp, self.dp, self.ep, self.expert_tp, self.stage.peers):
            number = group.least(number, device)
        return number


NO_MESH = Mesh()


def on_all(run: Callable[[], Result], agree: Callable[[bool], bool], elsewhere: OutpaceError) -> Result:
    """Run something that must work on all ranks. Raises this rank's error, or `elsewhere` if only others failed.

    agree: whether a condition holds on all ranks.
    """
    try:
        result = run()
    except Exception:
        agree(False)
        raise
    if not agree(True):
        raise elsewhere
    return result


def make_mesh(config: InferenceConfig) -> Mesh:
    """Make the groups of a config, which must be the same on every rank of the world."""
    asked, moe, stages = config.tensor_parallel, config.moe, config.pipeline_parallel.pp_size
    _check_given(asked, moe)
    given = (asked.mpu, asked.tp_group, moe.ep_group, moe.ep_mp_group)
    if num_ranks(config) == 1 and all(each is None for each in given):
        return NO_MESH
    device = config.torch_device.type
    if not isinstance(config, LLMConfig) and _local_of_llm():
        raise StateError(
            f"{_asked(config)}: the other ranks of this process only serve an LLM; shut it down first, or make the "
            "engine in processes that torchrun starts"
        )
    world = join_world(device, _asked(config))
    if world % stages:
        raise ConfigError(
            f"pipeline_parallel.pp_size: {world} ranks cannot be divided into {stages} stages; start a multiple of "
            f"{stages}"
        )
    tp, dp = _tensor_groups(config, world, device)
    ep, expert_tp = _expert_groups(config, world, device)
    stage = _stage(stages, max(tp.size, ep.size) if isinstance(config, LLMConfig) else tp.size, world, device)
    mesh = Mesh(tp, ep, expert_tp, dp, stage)
    divided = f"{stages} stages, " if stages > 1 else ""
    shares = f"{divided}{tp.size} share each layer, {ep.size} the experts, {dp.size} copies"
    chosen("ranks", world, f"{shares} ({_backend(tp, ep, stage.peers)})")
    return mesh


def _asked(config: InferenceConfig) -> str:
    """The options that ask for ranks."""
    stages = config.pipeline_parallel.pp_size
    more = f"pipeline_parallel.pp_size={stages}, " if stages > 1 else ""
    return f"{more}tensor_parallel.tp_size={config.tensor_parallel.tp_size}, moe.ep_size={config.moe.ep_size}"


def _stage(stages: int, together: int, world: int, device: str) -> Stage:
    """This rank's pipeline stage. together: the consecutive ranks that run the same batches."""
    if stages == 1:
        return ONLY
    shape = stages, world // stages // together, together
    mesh = init_device_mesh(device, shape, mesh_dim_names=("stages", "copies", "together"))
    every = torch.arange(world).view(shape)
    mine, everyone = dist.get_rank(), ALONE
    for copy in range(shape[1]):
        ranks = every[:, copy].flatten().tolist()
        handle = dist.new_group(ranks)  # torch: every rank must take part in creating every group
        if mine in ranks and isinstance(handle, dist.ProcessGroup):
            everyone = Group.of(handle)
    number = stage_of(mine // (world // stages), stages)
    return Stage.of(number, stages, Group.of(mesh.get_group("stages")), everyone)


def join_world(device: str, asked_by: str) -> int:
    """Join the world of the environment, unless this process is in one already; returns its size."""
    if not dist.is_initialized():
        if missing := [name for name in STARTED_BY if name not in os.environ]:
            raise ConfigError(
                f"{asked_by}: this process is alone ({', '.join(missing)} not set); start it with "
                "torchrun --nproc-per-node N, or use outpace.LLM or outpace serve, which start their ranks themselves"
            )
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        rendezvous.join(BACKENDS[device])
    return dist.get_world_size()


def mark_as_of_llm(local: int) -> None:
    """Mark this world as started by an LLM, whose other ranks only run its steps. local: ranks per machine."""
    dist.distributed_c10d._get_default_store().set(_OF_LLM, str(local))


def _local_of_llm() -> int:
    """Ranks per machine of a world started by an LLM; 0: it was not."""
    with contextlib.suppress(RuntimeError, ValueError):  # a world without a store was made by the user
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        return int(store.get(_OF_LLM)) if store is not None and store.check([_OF_LLM]) else 0
    return 0


def _check_given(asked: TensorParallelConfig, moe: MoEConfig) -> None:
    """Refuse invalid groups before any rank waits for others."""
    if asked.mpu is not None and not any(name in dir(asked.mpu) for name in _MPU):
        raise ConfigError(
            f"tensor_parallel.mpu: expected an object with {' or '.join(_MPU)}, got {type(asked.mpu).__name__}"
        )
    if asked.mpu is not None and asked.tp_group is not None:
        raise ConfigError("tensor_parallel.mpu and tensor_parallel.tp_group: both set a group; set only one of them")
    given = {
        "tensor_parallel.tp_group": asked.tp_group,
        "moe.ep_group": moe.ep_group,
        "moe.ep_mp_group": moe.ep_mp_group,
    }
    for field, handle in given.items():
        if handle is not None and not isinstance(handle, dist.ProcessGroup):
            raise ConfigError(f"{field}: expected a process group of torch.distributed, got {type(handle).__name__}")
    if moe.ep_mp_group is not None and moe.ep_group is None:
        raise ConfigError("moe.ep_mp_group: it needs moe.ep_group; set both or neither")


def _tensor_groups(config: InferenceConfig, world: int, device: str) -> tuple[Group, Group]:
    """The tensor parallel group, and the group of ranks that hold the same part of each layer."""
    asked = config.tensor_parallel
    if asked.tp_group is not None or asked.mpu is not None:
        ready = asked.tp_group if asked.mpu is None else _of_mpu(asked.mpu)
        group = _checked("tensor_parallel.tp_group" if asked.mpu is None else "tensor_parallel.mpu", ready)
        if asked.tp_size not in (1, group.size):
            raise ConfigError(
                f"tensor_parallel.tp_size: {asked.tp_size}, but the group that is given has {group.size} ranks; "
                "remove one of them"
            )
        return group, ALONE
    return _cut("tensor_parallel.tp_size", world, asked.tp_size, device, config.pipeline_parallel.pp_size)


def _expert_groups(config: InferenceConfig, world: int, device: str) -> tuple[Group, Group]:
    moe = config.moe
    if moe.ep_group is not None:
        sliced = ALONE if moe.ep_mp_group is None else _checked("moe.ep_mp_group", moe.ep_mp_group)
        return _checked("moe.ep_group", moe.ep_group), sliced
    if moe.ep_size == 1:
        return ALONE, ALONE
    return _cut("moe.ep_size", world, moe.ep_size, device, config.pipeline_parallel.pp_size)


def _cut(field: str, world: int, size: int, device: str, stages: int) -> tuple[Group, Group]:
    """Groups of `size` consecutive ranks of a stage, and groups of ranks at the same position in them."""
    ranks = world // stages
    if ranks % size:
        where = "" if stages == 1 else f" of each of {stages} stages"
        raise ConfigError(
            f"{field}: {ranks} ranks{where} cannot be divided into groups of {size}; start a multiple of {size}{where}"
        )
    if size == 1 and stages == 1:
        return ALONE, Group.of(dist.group.WORLD) if world > 1 and dist.group.WORLD is not None else ALONE
    mesh = init_device_mesh(device, (stages, ranks // size, size), mesh_dim_names=("stages", "outer", "inner"))
    inner, outer = (Group.of(mesh.get_group(name)) for name in ("inner", "outer"))
    return (inner if size > 1 else ALONE), (outer if outer.size > 1 else ALONE)


def _of_mpu(mpu: Any) -> Any:
    """The group of a Megatron-style unit."""
    name = next(name for name in _MPU if name in dir(mpu))
    try:
        return getattr(mpu, name)()
    except Exception as error:
        raise ConfigError(
            f"tensor_parallel.mpu: {name}() raised {type(error).__name__}: {error}; make its groups before the engine"
        ) from error


def _checked(field: str, handle: Any) -> Group:
    # mpu is user code: check what it returns
    if not isinstance(handle, dist.ProcessGroup) or dist.get_rank(handle) < 0:
        raise ConfigError(f"{field}: this rank is not in the group; give each rank one that it is in")
    return Group.of(handle)


def _backend(*groups: Group) -> str:
    return next((dist.get_backend(group.handle) for group in groups if group.handle is not None), "alone")
