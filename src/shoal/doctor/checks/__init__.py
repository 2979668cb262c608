"""What the doctor looks at. One file a check; this table is the list of them, in the order in which they are shown."""

from __future__ import annotations

from shoal.doctor.checks.clock import CLOCK
from shoal.doctor.checks.descriptors import DESCRIPTORS
from shoal.doctor.checks.disk import DISK
from shoal.doctor.checks.interfaces import INTERFACES
from shoal.doctor.checks.leftovers import LEFTOVERS
from shoal.doctor.checks.links import LINKS
from shoal.doctor.checks.memory import MEMORY
from shoal.doctor.checks.names import NAMES
from shoal.doctor.checks.ports import PORTS
from shoal.doctor.checks.shared_memory import SHARED_MEMORY
from shoal.doctor.checks.threads import THREADS
from shoal.doctor.checks.versions import VERSIONS
from shoal.doctor.finding import Check
from shoal.table import Table

TABLE: Table[Check] = Table(
    "check of the doctor",
    {
        "versions": VERSIONS,
        "interfaces": INTERFACES,
        "names": NAMES,
        "ports": PORTS,
        "links": LINKS,
        "clock": CLOCK,
        "memory": MEMORY,
        "shared-memory": SHARED_MEMORY,
        "descriptors": DESCRIPTORS,
        "threads": THREADS,
        "disk": DISK,
        "leftovers": LEFTOVERS,
    },
)
