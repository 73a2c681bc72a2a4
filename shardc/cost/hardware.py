"""Hardware descriptions: compute, memory and links of a rank, placement of a mesh on nodes, prices of collectives.

Peaks are the vendors' data sheet values without sparsity; efficiencies are the share of a peak that a good kernel or a
large message reaches. ``sources`` says which values were fitted to published runs; ``docs/looking.md`` compares the
predictions with other runs. Latencies are those of NCCL's tuning model (NCCL, src/graph/tuning.cc) for its ring and
tree algorithms with the low-latency protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import ceil, log2
from pathlib import Path

import torch

from shardc.cost.model import CostModel, Measured, Messages
from shardc.errors import MeshError
from shardc.ir.comm import is_ring
from shardc.ir.mesh import Mesh, split_part
from shardc.validate import near


@dataclass(frozen=True)
class Link:
    """A connection between ranks, or between device and host: its bandwidth, and its latency per hop.

    Args:
        name: the usual name of its technology.
        bandwidth: bytes per second that one rank sends.
        ring: seconds of one hop of a ring.
        tree: seconds of one level of a tree.
    """

    name: str
    bandwidth: float
    ring: float
    tree: float


@dataclass(frozen=True)
class Hardware:
    """Description of a cluster of nodes with equal ranks: compute rates, memory and links, from which it predicts
    seconds.

    Args:
        name: the name that ``find`` looks up.
        node: ranks in a node.
        largest: ranks of the largest installation that the numbers are valid for.
        flops: (dtype, peak operations per second of a matrix product), per rank.
        memory: bytes per rank.
        memory_bandwidth: bytes per second that a rank reads or writes.
        inside, between: the links within a node and between nodes.
        host: the link between a rank's device and host memory, full duplex; ranks do not share it.
        host_memory_bandwidth: bytes per second of host memory that a rank reads or writes while all of a node do.
        start: seconds of a collective before its first hop.
        kernel: minimum seconds of a local kernel.
        matmul, streaming, wire: the shares of the peaks (flops, memory bandwidth, links) that are reached.
        gathers_by_tree: with one rank per node, all-gathers and reduce-scatters need a logarithmic number of hops.
        sources: the publications that the numbers are from.
        attention: share of the peak that attention reaches; None: ``matmul``.
        launch: launch overhead per kernel in seconds, if the rank launches synchronously; 0 if launches are hidden.
        call, message: seconds that a rank is busy for starting a collective, and for each of its messages.
        share: share of the transfer time during which the rank's own core is busy sending, so that concurrent compute
            is slower; 0 if other hardware sends.
        rings: measured all-reduces among more than two CPU ranks, which use gloo's ring (`shardc.ir.comm`); for other
            group sizes the latency per hop of the nearest size is used.
        tf32: peak operations per second of a float32 product in TF32; None if there is no TF32.
        precision: the setting of `torch.set_float32_matmul_precision` that float32 products are priced by. "highest" is
            float32; under "high" and "medium" CUDA computes them in TF32. Attention is priced alike under each.
    """

    name: str
    node: int
    largest: int
    flops: tuple[tuple[torch.dtype, float], ...]
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    host: Link
    host_memory_bandwidth: float
    start: float
    kernel: float
    matmul: float
    streaming: float
    wire: float
    gathers_by_tree: bool
    sources: tuple[str, ...]
    attention: float | None = None
    launch: float = 0.0
    call: float = 0.0
    message: float = 0.0
    share: float = 0.0
    rings: tuple[Measured, ...] = ()
    tf32: float | None = None
    precision: str = "highest"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Without the cached hash: a string's hash differs between processes.
        return Hardware, self._values

    @cached_property
    def _hash(self) -> int:  # cached, because every priced layout needs it
        """The hash of the fields."""
        return hash(self._values)

    @property
    def _values(self) -> tuple[object, ...]:
        """Return the values of all fields of this hardware, for comparisons."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def at(self, precision: str) -> Hardware:
        """Return this hardware with float32 products under ``precision``, as `torch.get_float32_matmul_precision` names
        it.

        >>> H100.at("high").peak(torch.float32) / H100.peak(torch.float32) > 7
        True
        """
        return self if self.tf32 is None or precision == self.precision else replace(self, precision=precision)

    def peak(self, dtype: torch.dtype, attention: bool = False) -> float:
        """Return the peak operations per second in ``dtype``; float32 stands in for a dtype without a figure. Matrix
        products in float32 may have the peak of TF32, ``attention`` does not.
        """
        by_dtype = dict(self.flops)
        if self.tf32 is not None and self.precision != "highest" and dtype is torch.float32 and not attention:
            return self.tf32
        return by_dtype.get(dtype, by_dtype[torch.float32])

    def rate(self, dtype: torch.dtype, attention: bool = False) -> float:
        """Return the operations per second in ``dtype`` that a matrix product reaches, or ``attention``."""
        reached = self.attention if attention and self.attention is not None else self.matmul
        return self.peak(dtype, attention) * reached

    def collective_seconds(self, kind: str, mesh: Mesh, axes: tuple[str, ...], wire_bytes: float) -> float:
        """Return the seconds of a collective of ``kind``, of one tensor, over ``axes``; each rank sends
        ``wire_bytes``.
        """
        where = route(mesh, axes, self.node)
        if where.ranks == 1:
            return 0.0
        messages = 0 if is_ring(kind, where.ranks) else where.ranks - 1
        return price(self, kind, where, wire_bytes).seconds + self.start_seconds(messages)

    def least_seconds(self, wire_bytes: float) -> float:
        """Return a lower bound of the seconds of the collectives in which a rank sends ``wire_bytes`` in total,
        whatever their kinds and number.
        """
        # A rank may send within its node and to other nodes at the same time.
        hop = min(self.inside.ring, self.inside.tree, self.between.ring, self.between.tree)
        return self.start + hop + wire_bytes / (self.wire * (self.inside.bandwidth + self.between.bandwidth))

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds of a local kernel that reads and writes ``nbytes`` in total and has no FLOPs."""
        return self.compute_seconds(0, nbytes)

    def linear(self, direct: bool) -> tuple[float, float]:
        """Return (seconds before the first byte, bytes per second after it) of a collective between nodes, whether or
        not it is ``direct`` (sent as messages between ranks).

        ``direct`` makes no difference: `price` knows one way for each kind of collective. On GPUs that is NCCL's, and
        on hardware that ``calibrate`` measured, the messages between ranks (``call``, ``message``), as ranks run them.
        """
        return self.start + self.between.ring + self.start_seconds(1), self.between.bandwidth * self.wire

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype = torch.float32, attention: bool = False
    ) -> float:
        """Return the seconds of one kernel: the roofline (Williams, Waterman and Patterson, 2009) and a launch."""
        streaming = self.memory_bandwidth * self.streaming
        return self.launch + max(flops / self.rate(dtype, attention), nbytes / streaming, self.kernel)

    def update_seconds(self, nbytes: float, host: bool) -> float:
        """Return the seconds of an optimizer's update that reads and writes ``nbytes``: on the host if ``host``, else
        on the device.
        """
        return nbytes / (self.host_memory_bandwidth * self.streaming) if host else self.copy_seconds(nbytes)

    @property
    def sends(self) -> bool:
        """Return whether the cores that compute on a rank also send its messages, as in direct collectives on CPUs."""
        return self.call > 0

    def start_seconds(self, messages: int) -> float:
        """Return the seconds that a rank is busy starting a collective of ``messages`` messages."""
        return self.call + self.message * messages

    @property
    def is_host(self) -> bool:
        """Return whether ranks compute in host memory (CPUs), so that offloading saves nothing."""
        return self.host.name == "memory"

    def move(self, nbytes: int) -> Price:
        """Return the `Price` (seconds, "copy", name of the link) of a copy of ``nbytes`` between device and pinned host
        memory.
        """
        return Price(self.host.ring + nbytes / (self.host.bandwidth * self.wire), "copy", self.host.name)

    def check(self, mesh: Mesh) -> None:
        """Raise MeshError if ``mesh`` has more ranks than this description is valid for."""
        if mesh.ranks > self.largest:
            raise MeshError(
                f"the mesh {mesh} has {mesh.ranks} ranks; {self.name} is described for at most {self.largest}",
                fix="use a smaller mesh, or dataclasses.replace(hardware, largest=...)",
            )


@dataclass(frozen=True)
class Route:
    """The placement of a group of ranks on nodes: how many nodes, and how many ranks in each.

    Args:
        ranks: size of the group.
        nodes: number of nodes that it spans.
        per_node: its ranks in each node.
    """

    ranks: int
    nodes: int
    per_node: int

    def link(self, hardware: Hardware) -> Link:
        """Return the slowest link between ranks of the group: the link within a node, or between nodes if the group has
        several.
        """
        return hardware.inside if self.nodes == 1 else hardware.between

    def ring_bandwidth(self, hardware: Hardware) -> float:
        """Return the bytes per second that a rank sends in a ring of this group. Data that leaves a node can use the
        network cards of all ranks of the group there.
        """
        inside = hardware.inside.bandwidth
        across = hardware.between.bandwidth * self.per_node
        if self.nodes == 1:
            return inside * hardware.wire
        return (min(inside, across) if self.per_node > 1 else across) * hardware.wire


@lru_cache(maxsize=4096)
def route(mesh: Mesh, axes: tuple[str, ...], node: int) -> Route:
    """Return how the groups along ``axes`` lie on nodes of ``node`` ranks each. Rank 0 is the first of node 0, and the
    last axes of the mesh vary fastest. If a node does not hold a whole number of groups, the groups count as crossing
    nodes.

    >>> route(Mesh(dp=4, tp=8), ("tp",), 8), route(Mesh(dp=4, tp=8), ("dp",), 8)
    (Route(ranks=8, nodes=1, per_node=8), Route(ranks=4, nodes=4, per_node=1))
    """
    offsets, block = [0], 1
    for axis in axes:
        name, before, _ = split_part(axis)
        size = mesh.size(axis)
        minor = 1
        for other in mesh.axes[mesh.axes.index(name) + 1 :]:
            minor *= mesh.size(other)
        stride = minor * (mesh.size(name) // (before * size))
        block = max(block, stride * size)
        offsets = [have + stride * at for have in offsets for at in range(size)]
    if node % block == 0:
        return Route(len(offsets), 1, len(offsets))
    nodes = len({at // node for at in offsets})
    if nodes == 1:  # the first group is in one node, but others are not
        return Route(len(offsets), 2, ceil(len(offsets) / 2))
    return Route(len(offsets), nodes, ceil(len(offsets) / nodes))


@dataclass(frozen=True)
class Price:
    """The predicted seconds of one collective or host copy, with the names of the algorithm and the link that are
    assumed.
    """

    seconds: float
    algorithm: str
    link: str


def price(hardware: Hardware, kind: str, where: Route, wire_bytes: float) -> Price:
    """Return the `Price` of a collective in which each rank sends ``wire_bytes``: start, hops, bytes over bandwidth.

    The fastest of a ring, a double binary tree (all-reduce; Sanders, Speck and Traeff, 2009) and, with one rank per
    node, NCCL 2.23's logarithmic all-gather and reduce-scatter. An all-to-all sends point to point.

    Args:
        kind: the kind of collective, as in `shardc.cost.redistribute.Step`.
        where: the placement of its group on nodes.
    """
    link = where.link(hardware).name
    if where.ranks == 1:
        return Price(0.0, "none", link)
    if kind in ("all_to_all", "permute_ranks", "broadcast"):
        sent = where.link(hardware).ring + wire_bytes / direct_bandwidth(hardware, kind, where)
        return Price(hardware.start + sent, "direct", link)
    if hardware.rings and is_ring(kind, where.ranks):
        row = min(hardware.rings, key=lambda row: abs(row.ranks - where.ranks))
        hops = row.latency * (where.ranks - 1) / (row.ranks - 1)
        return Price(hops + wire_bytes / row.bandwidth, "ring", link)
    moved = wire_bytes / where.ring_bandwidth(hardware)
    rounds = 2 if kind == "all_reduce" else 1
    hops = rounds * ((where.ranks - where.nodes) * hardware.inside.ring + (where.nodes - 1) * hardware.between.ring)
    options = [Price(hardware.start + hops + moved, "ring", link)]
    if kind == "all_reduce":
        levels = ceil(log2(where.nodes)) * hardware.between.tree + (where.per_node - 1) * hardware.inside.tree
        options.append(Price(hardware.start + rounds * levels + moved, "tree", link))
    elif hardware.gathers_by_tree and where.per_node == 1 and where.nodes > 1:
        levels = ceil(log2(where.nodes)) * hardware.between.tree
        options.append(Price(hardware.start + levels + moved, "pat", link))
    return min(options, key=lambda option: option.seconds)


def direct_bandwidth(hardware: Hardware, kind: str, where: Route) -> float:
    """Return the bytes per second that a rank sends in a collective of ``kind`` that consists of direct messages.
    ``where`` says on how many nodes its ranks are.

    Links within the rank's node and between nodes carry data concurrently.
    """
    outside = 0.0 if where.nodes == 1 else 1.0
    if kind == "all_to_all" and where.ranks > 1:
        outside *= (where.ranks - where.per_node) / (where.ranks - 1)
    return hardware.wire / max(outside / hardware.between.bandwidth, (1 - outside) / hardware.inside.bandwidth)


_NCCL = "NCCL src/graph/tuning.cc: base latency 6.6 us, ring hop 0.6 us on NVLink and 2.7 us on a network, tree 5 us"
_T = 1e12

A100 = Hardware(
    name="a100", node=8, largest=16384,
    flops=((torch.float32, 19.5 * _T), (torch.float64, 19.5 * _T),
           (torch.bfloat16, 312 * _T), (torch.float16, 312 * _T)),
    memory=80e9, memory_bandwidth=2.039e12,
    inside=Link("NVLink 3", 300e9, 0.6e-6, 0.6e-6), between=Link("InfiniBand HDR", 25e9, 2.7e-6, 5e-6),
    host=Link("PCIe 4.0 x16", 32e9, 2e-6, 2e-6), host_memory_bandwidth=51.2e9,
    start=6.6e-6, kernel=2e-6, matmul=0.70, streaming=0.85, wire=0.8, gathers_by_tree=True, attention=0.65,
    tf32=156 * _T,
    sources=(
        "NVIDIA A100 80GB SXM data sheet (2021): 312 TFLOPS dense bf16, 156 TF32, 2,039 GB/s, NVLink 600 and PCIe 64 "
        "GB/s both ways",
        "NVIDIA DGX A100 data sheet: eight 200 Gb/s ConnectX-6 cards for eight GPUs, two EPYC 7742 of eight channels "
        "DDR4-3200: 409.6 GB/s for them all",
        "Meta, Introducing the AI Research SuperCluster (2022): 16,000 A100", _NCCL,
        "matmul: fitted to Llama 3 8B on 64 A100, 2,973 tokens/s a rank (torchtitan docs/performance.md); attention: "
        "FlashAttention-2 (arXiv:2307.08691) reaches 50 to 73 %",
    ),
)  # fmt: skip

H100 = replace(
    A100, name="h100", largest=24576, attention=0.35, tf32=494.7 * _T,
    flops=((torch.float32, 67 * _T), (torch.float64, 67 * _T),
           (torch.bfloat16, 989.4 * _T), (torch.float16, 989.4 * _T),
           (torch.float8_e4m3fn, 1978.9 * _T), (torch.float8_e5m2, 1978.9 * _T)),
    memory=80e9, memory_bandwidth=3.35e12,
    inside=Link("NVLink 4", 450e9, 0.6e-6, 0.6e-6), between=Link("InfiniBand NDR / 400G RoCE", 50e9, 2.7e-6, 5e-6),
    host=Link("PCIe 5.0 x16", 64e9, 2e-6, 2e-6), host_memory_bandwidth=76.8e9,
    sources=(
        "NVIDIA H100 SXM data sheet (2023): 989.4 TFLOPS dense bf16, 494.7 TF32, 3.35 TB/s, NVLink 900 and PCIe 128 "
        "GB/s both ways",
        "NVIDIA DGX H100 data sheet: eight 400 Gb/s ConnectX-7 cards for eight GPUs, two Xeon 8480C of eight channels "
        "DDR5-4800: 614.4 GB/s for them all",
        "Meta, Building Meta's GenAI infrastructure (2024): two clusters of 24,576 H100", _NCCL,
        "attention: FlashAttention-2 has 35 % (FlashAttention-3, arXiv:2407.08608); matmul: the A100's, not fitted",
    ),
)  # fmt: skip

H100_500W = replace(
    H100, name="h100-500w", memory=96e9, memory_bandwidth=2.4e12, matmul=0.60,
    sources=(
        "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s, a power limit of 500 W; "
        "matmul: fitted to its Llama 3.1 8B on 8 ranks, bf16, compiled: 6,667 tokens/s a rank",
        *H100.sources,
    ),
)  # fmt: skip

H200 = replace(
    H100, name="h200", memory=141e9, memory_bandwidth=4.8e12,
    sources=("NVIDIA H200 SXM data sheet (2024): 141 GB, 4.8 TB/s, otherwise as the H100", *H100.sources),
)  # fmt: skip

B200 = replace(
    H100, name="b200", tf32=1125 * _T,
    flops=((torch.float32, 80 * _T), (torch.float64, 40 * _T), (torch.bfloat16, 2250 * _T), (torch.float16, 2250 * _T),
           (torch.float8_e4m3fn, 4500 * _T), (torch.float8_e5m2, 4500 * _T)),
    memory=180e9, memory_bandwidth=8e12, inside=Link("NVLink 5", 900e9, 0.6e-6, 0.6e-6),
    sources=(
        "NVIDIA Blackwell brief (2024), HGX B200: 2.25 PFLOPS dense bf16, 1.125 TF32, 8 TB/s, NVLink 1.8 TB/s both "
        "ways",
        "NVIDIA DGX B200 user guide: 1,440 GB for eight GPUs, eight ConnectX-7 cards", _NCCL,
    ),
)  # fmt: skip

CPU = Hardware(
    name="cpu", node=64, largest=64,
    flops=((torch.float32, 50e9), (torch.float64, 25e9), (torch.bfloat16, 50e9)),
    memory=4e9, memory_bandwidth=10e9,
    inside=Link("loopback", 1e9, 30e-6, 30e-6), between=Link("10 Gbit/s Ethernet", 1.25e9, 60e-6, 60e-6),
    host=Link("memory", 5e9, 5e-6, 5e-6), host_memory_bandwidth=10e9,
    start=100e-6, kernel=5e-6, matmul=0.8, streaming=0.8, wire=1.0, gathers_by_tree=False,
    sources=("one core a rank under gloo on loopback, a development machine: orders of magnitude, not a measurement",),
)  # fmt: skip


def calibrated(cost: CostModel) -> Hardware:
    """Return the hardware of this machine's CPU ranks, with the rates of a ``cost`` that ``calibrate`` measured."""
    sent = cost.messages or Messages(cost.latency, 0.0, 0.0, cost.hop, cost.bandwidth, 0.0)
    link = Link("measured", sent.bandwidth, sent.hop, sent.hop)
    flops = tuple((dtype, cost.flops * part) for dtype, part in ((torch.float32, 1.0), (torch.float64, 0.5)))
    return replace(
        CPU, name="calibrated cpu", flops=flops, memory_bandwidth=cost.memory_bandwidth, inside=link, between=link,
        host=Link("memory", cost.memory_bandwidth / 2, 0.0, 0.0), host_memory_bandwidth=cost.memory_bandwidth,
        start=sent.latency, kernel=0.0, matmul=1.0, streaming=1.0, wire=1.0, sources=("python -m shardc calibrate",),
        attention=cost.attention, launch=cost.launch, call=sent.call, message=sent.message, share=sent.share,
        rings=tuple(row for row in cost.kinds if is_ring(row.kind, row.ranks)),
    )  # fmt: skip


KNOWN: dict[str, Hardware] = {hardware.name: hardware for hardware in (A100, H100, H100_500W, H200, B200, CPU)}


def is_file(name: str) -> bool:
    """Return whether ``name`` stands for a JSON file of ``calibrate``, and not for one of the `KNOWN` descriptions."""
    return Path(name).suffix == ".json"


def find(name: str) -> Hardware:
    """Return the hardware called ``name``; for a ``.json`` file of ``calibrate``, the machine that it measured.

    Raises:
        MeshError: there is no such description.
        InputError: the file was not written by ``calibrate``.
    """
    if is_file(name):
        return calibrated(CostModel.load(name))
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    fix = near(name.lower(), KNOWN, f"use one of {', '.join(KNOWN)}, or a file of calibrate's")
    raise MeshError(f"no hardware is called {name!r}", fix=fix)
