"""Facts of an exchange, known before anything runs: for the plan's checks, `shoal list`, the docs and the tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile, ParameterProfile
from shoal.types import Promise
from shoal.world.mesh import Mesh


class Facts(ABC):
    """Facts of one choice; nothing here needs a model or a process group."""

    promise: ClassVar[Promise]
    summary: ClassVar[str]
    bound: ClassVar[float] = 0.0
    """The share of what ddp learns in as many steps that may be lost, in the convergence tests."""
    Options: ClassVar[type]
    every_worker_computes: ClassVar[bool] = False
    """True if a worker without samples must run the model all the same, because its collectives are in there."""
    compresses: ClassVar[bool] = False
    """True if a compressor can be put between its workers."""
    cuts_parameters: ClassVar[bool] = False
    """True if parameters themselves are cut over the data axis, so that it needs the mesh in torch's own form."""
    whole_updates: ClassVar[bool] = False
    """True if every worker updates all parameters that it holds."""
    whole_models: ClassVar[bool] = False
    """True if a worker holds a whole model, which neither tensor parallel nor a pipeline has cut."""
    updates_alone: ClassVar[bool] = False
    """True if each worker applies its own gradients between synchronisations: local SGD and its kin."""
    uses_servers: ClassVar[bool] = False
    """True if workers talk to servers only: they run no collective, and each may be at another step."""
    keeps_rows: ClassVar[bool] = False
    """True if it keeps the rows of a SparseEmbedding, and brings them."""

    takes_own_step: ClassVar[bool] = False
    """True if it can follow a step of the user's own: several models, losses and optimizers."""
    one_copy: ClassVar[bool] = False
    """True if the workers of a host hold one copy of the parameters between them."""

    in_host_memory: ClassVar[bool] = False
    """True if models lie in memory that the processes of a host share, where no card computes."""

    @classmethod
    @abstractmethod
    def cost(
        cls, options: Any, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        """Bytes that a worker holds and sends; `options` are of the class's own `Options`.

        Of `mesh`, only sizes and places are used: `Mesh.imagine` will do. Under servers, of a worker and not of them.
        """

    @classmethod
    def elements_held(cls, options: Any, parameter: ParameterProfile, mesh: Mesh) -> int:
        """Of a parameter's gradient, the elements that `get_grad` finds on this worker."""
        del options, mesh
        return parameter.numel
