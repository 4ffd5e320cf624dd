"""The pure half of the link probe: what it can run, with how many SMs, and on what rows. Not a kernel to tune.

A config's `way` is one of `link_model.WAYS`, or copy_engine, echo, launch or gemm. Nothing here imports torch.
"""

from __future__ import annotations

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel
from tktune.core.space import Constraint, Parameter, Space
from tktune.families.base import RankSeat, Workbench, family
from tktune.families.formulas import SPIN_LIMIT_S, ceil_div, round_up
from tktune.families.link_model import PEER_WAYS, WAYS

TARGET = "tktune.families.link_probe.space:FAMILY"  # the name that a gang finds this family under
OTHER_WAYS = ("copy_engine", "echo", "launch", "gemm")
NEEDS_PEER = (*PEER_WAYS, "copy_engine", "echo")
SMS = (1, 2, 4, 8, 12, 16, 24, 32)
FANS = (1, 4, 8)
USUAL_ROW_BYTES = 8192
ROW_BYTES = (4096, 8192, 14336)
LOCAL_EXPERTS = 16
WARPS = 4  # of a block, that copy in bulk
RESERVE_BYTES, MOST_PENDING, MOST_WARP_SLOTS = 2048, 8, 16
ECHO_ROUNDS = 256
SOURCE_BYTES, TARGET_BYTES = 1 << 27, 1 << 28  # of every rank: more than any L2
STORED_BYTES_OF_SM = 24_000_000  # about half a millisecond of one SM's copies
MOST_REMOTE_BYTES = 256_000_000
PIECE_BYTES, THREAD_PIECES = 16, 8  # of a plain copy: what a thread moves at a time, how many are in flight
PIECES_AT_ONCE = 512 * THREAD_PIECES  # of a block
LINK_BUILD = Config(part="link")  # the build part of the probe itself; that of the GEMM is the GEMM's


def probe_problem(world: int) -> Problem:
    """What a gang of `world` ranks is seated for. Its shapes are those of the GEMM that is slowed down: enough tiles
    (24 columns of 256 × 256 rows of 128) that the last wave hardly counts.
    """
    return Problem(TARGET, 2048, 6144, LOCAL_EXPERTS * world, 1, 32768, world=world)


def gemm_problem(problem: Problem) -> Problem:
    """The grouped GEMM of one rank: `tokens` rows, its local experts, as evenly as they come."""
    return Problem(
        "grouped_gemm", problem.hidden, problem.cols, problem.local_experts, problem.top_k, problem.tokens
    )


def gemm_config(problem: Problem, device: DeviceClass) -> Config:
    """The default config of that GEMM."""
    inner = gemm_problem(problem)
    return family("grouped_gemm").space(inner, device).default_config()


def gemm_build_part(problem: Problem, device: DeviceClass) -> Config:
    inner = gemm_problem(problem)
    return family("grouped_gemm").space(inner, device).build_part(gemm_config(problem, device))


def row_slots(row_bytes: int, smem_bytes: int) -> tuple[int, int]:
    """Rows of a warp that fit, and how many of them may still be written while others load."""
    of_warp = min((smem_bytes - RESERVE_BYTES) // row_bytes // WARPS, MOST_WARP_SLOTS)
    return of_warp, min(of_warp // 2, MOST_PENDING)


def slots_of_block(way: str, row_bytes: int, device: DeviceClass) -> int:
    """Rows on their way in one block; of a plain copy, rows' worth of pieces."""
    if way.startswith("plain"):
        return PIECES_AT_ONCE * PIECE_BYTES // row_bytes
    return WARPS * row_slots(row_bytes, device.smem_optin_bytes)[0]


def rows_within(nbytes: int, row_bytes: int) -> int:
    """The largest power of two of rows that `nbytes` hold."""
    return 1 << ((nbytes // row_bytes).bit_length() - 1)


def items_of(config: Config) -> int:
    """Rows that a timed launch loads (pieces of 16 bytes, of a plain copy): the same number for every warp."""
    way, sms, fan = str(config["way"]), config.number("sms"), config.number("fan")
    unit, at_once = (
        (PIECE_BYTES, PIECES_AT_ONCE) if way.startswith("plain") else (config.number("row_bytes"), WARPS)
    )
    loaded = STORED_BYTES_OF_SM * sms / fan
    if way in PEER_WAYS:
        loaded = min(loaded, MOST_REMOTE_BYTES)
    return round_up(ceil_div(int(loaded), unit), at_once * sms)


def stored_bytes(config: Config) -> int:
    """Bytes that a timed launch stores."""
    if config["way"] == "copy_engine":
        return SOURCE_BYTES
    unit = PIECE_BYTES if str(config["way"]).startswith("plain") else config.number("row_bytes")
    return items_of(config) * config.number("fan") * unit


def sm_counts(device: DeviceClass) -> tuple[int, ...]:
    return tuple(count for count in SMS if count <= device.sm_count)


def given_away(device: DeviceClass) -> tuple[int, ...]:
    """How many SMs the GEMM is run without: none, then steps of 8 up to a third of the device."""
    return tuple(range(0, device.sm_count // 3 + 1, 8))


class LinkProbe:
    """Moves rows between ranks in every way, echoes signals, and runs a GEMM on fewer SMs."""

    name = "link_probe"
    purpose = "what the link and the SMs of a machine can do"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        ways = (*WAYS, *OTHER_WAYS) if problem.world > 1 else ("own", "scatter_own", "launch", "gemm")
        return Space(
            problem,
            device,
            (
                Parameter("way", ways, "launch", "what is run"),
                Parameter("sms", tuple(sorted({*sm_counts(device), *_gemm_sms(device)})), "launch", "blocks"),
                Parameter("fan", FANS, "launch", "stores of each row"),
                Parameter("row_bytes", ROW_BYTES, "launch", "bytes of a row"),
            ),
            [
                Constraint(
                    "row_fits_a_slot", "two rows of each warp fit shared memory", _rows_fit, ("row_bytes",)
                )
            ],
            Config(way="own", sms=1, fan=1, row_bytes=USUAL_ROW_BYTES),
            _same_behaviour,
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        """Copies wait for nobody. (The two threads of an echo take turns, and their waits are bounded.)"""
        return RoleModel(
            roles=(Role("copy", config.number("sms")),),
            resident_blocks=device.sm_count,
            spin_limit_s=SPIN_LIMIT_S,
            world=problem.world,
        )

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        """About half a millisecond, whatever is run: rows are counted so that it takes that long."""
        return 500.0

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        if build_part != LINK_BUILD:
            return family("grouped_gemm").build_spec(build_part, gemm_problem(problem), device)
        root = csrc_root()
        return BuildSpec(
            name=f"link_probe-{device.arch}-w{problem.world}",
            kind="cubin",
            source=root / "kernels" / "link_probe.cu",
            arch=device.arch,
            defines={"TKT_WORLD": str(problem.world)},
            include_dirs=(root,),
        )

    def workbench(self, seat: RankSeat) -> Workbench:
        from tktune.families.link_probe.launch_cuda import LinkWorkbench

        return LinkWorkbench(seat)


def _gemm_sms(device: DeviceClass) -> tuple[int, ...]:
    return tuple(device.sm_count - count for count in given_away(device))


def _rows_fit(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    of_warp, _ = row_slots(config.number("row_bytes"), device.smem_optin_bytes)
    return None if of_warp >= 2 else f"{of_warp} rows a warp fit {device.smem_optin_bytes} bytes"


def _same_behaviour(config: Config) -> Config:
    """Only scatters have a fan, only bulk copies have rows, and what uses no SMs, or one, is told no number."""
    way = str(config["way"])
    if not way.startswith("scatter"):
        config = config.replace(fan=1)
    if way.startswith("plain") or way in OTHER_WAYS:
        config = config.replace(row_bytes=USUAL_ROW_BYTES)
    return config.replace(sms=1) if way in ("copy_engine", "echo", "launch") else config


FAMILY = LinkProbe()
