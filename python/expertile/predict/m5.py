"""A model of the Apple M5 (10 GPU cores, 24 GB): what a launch costs there, calibrated on reported figures.

    us = dispatch + sqrt(latency^2 + lines^2 + arithmetic^2 + memory^2)

    latency     (device_steps, shared_steps) . (their times), times the threads of a core over those it keeps in flight
    lines       128-byte lines that a core asks for, one after the other
    arithmetic  operations, decoded weights and flops, each at its rate
    memory      bytes beyond `cache_mb`, at the memory's bandwidth

The root of squares lies between bounds that overlap wholly (their maximum) and not at all (their sum). Seven constants
are fitted, by least squares on the logarithm of predicted over reported, to the figures of `CALIBRATION` tokens; those
of the other tokens judge them. No constant belongs to one kernel or one T. Every figure from here is a prediction: no
Mac has run these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from expertile.predict.expert_work import EXPERT_KERNELS
from expertile.predict.plan_work import PLAN_KERNELS, plan_launches
from expertile.predict.reported import Reported
from expertile.predict.work import Load, Work

# One wave of threadgroups and two: the other half needs no extrapolation. Chosen with the tables in view, so the bench
# prints the errors of the halves exchanged too.
CALIBRATION = (512, 2048)
KERNELS: dict[str, Callable[[Load], Work]] = {**PLAN_KERNELS, **EXPERT_KERNELS}
VARIANTS = ("baseline", "padscan", "onegroup", "two_dispatch", "single")
PRODUCTS = ("gemm_gate", "gemm_up", "gemm_down")


@dataclass(frozen=True)
class Rates:
    """The device's constants. The first four are given, the others fitted; those here are where the fit starts.

    memory_gb_s    of the M5's unified memory             multiply_tflops  of a core, middle of 0.7 to 1.3 published
    alu_gops       of a core: 128 lanes at about 1.5 GHz  decode_gweights  of a core, waits of the inner loop included
    cache_mb       of a launch's bytes, what the memory never sees
    in_flight      threads of a core that wait at the same time
    """

    n_cores: int = 10
    memory_gb_s: float = 153.0
    multiply_tflops: float = 1.0
    alu_gops: float = 190.0
    dispatch_us: float = 0.8
    device_step_us: float = 0.4
    shared_step_us: float = 0.05
    line_us: float = 0.001
    in_flight: float = 1000.0
    cache_mb: float = 50.0
    decode_gweights: float = 70.0


FITTED = ("dispatch_us", "device_step_us", "shared_step_us", "line_us", "in_flight", "cache_mb", "decode_gweights")

STARTS_IN_FLIGHT, STARTS_CACHE_MB = (500.0, 1500.0, 4000.0), (5.0, 50.0)


@dataclass(frozen=True)
class Time:
    """us and what most of it is: dispatch, latency, lines, arithmetic or memory."""

    us: float
    bound: str


def kernel_time(work: Work, rates: Rates) -> Time:
    """One launch alone on the device."""
    cores = min(work.threadgroups, rates.n_cores)
    on_a_core = -(-work.threadgroups // rates.n_cores) * work.threads
    chain = work.device_steps * rates.device_step_us + work.shared_steps * rates.shared_step_us
    parts = {
        "latency": chain * max(1.0, on_a_core / rates.in_flight),
        "lines": work.lines / cores * rates.line_us,
        "arithmetic": (
            work.operations / rates.alu_gops / 1e3
            + work.decoded / rates.decode_gweights / 1e3
            + work.flops / rates.multiply_tflops / 1e6
        )
        / cores,
        "memory": max(0.0, work.bytes - rates.cache_mb * 1e6) / rates.memory_gb_s / 1e3,
    }
    us = rates.dispatch_us + math.sqrt(sum(part * part for part in parts.values()))
    parts["dispatch"] = rates.dispatch_us
    return Time(us, max(parts, key=lambda name: parts[name]))


def works(load: Load) -> dict[str, Work]:
    """Every kernel's statement."""
    return {name: state(load) for name, state in KERNELS.items()}


def _in_turn(times: Sequence[Time]) -> Time:
    """One after the other; the bound is that of the longest."""
    return Time(sum(time.us for time in times), max(times, key=lambda time: time.us).bound)


def predict(load: Load, rates: Rates, stated: Mapping[str, Work] | None = None) -> dict[str, Time]:
    """Kernels by name; "plan VARIANT"; "gemms"; "layer before", "layer after" (the reported pair) and "layer".

    A group's launches take as long as the longest of them, but gate and up, which fill the device by themselves.
    """
    times = {name: kernel_time(work, rates) for name, work in (stated or works(load)).items()}
    times["gemm_up"], times["gemm_up_fp32"] = times["gemm_gate"], times["gemm_gate_fp32"]
    for variant in VARIANTS:
        groups = [[times[kernel] for kernel in group] for group in plan_launches(variant, load.n_blocks)]
        times[f"plan {variant}"] = _in_turn([max(group, key=lambda time: time.us) for group in groups])
    times["gemms"] = _in_turn([times[name] for name in PRODUCTS])
    end = [times[name] for name in ("act_f16_v4", "gemm_down", "mm_combine_v4")]
    half = [times["mm_gather_h"], times["gemm_gate"], times["gemm_up"], *end]
    full = [times["mm_gather"], times["gemm_gate_fp32"], times["gemm_up_fp32"], *end]
    times["layer before"] = _in_turn([times["plan baseline"], *full])
    times["layer after"] = _in_turn([times["plan padscan"], *half])
    times["layer"] = _in_turn([times["plan two_dispatch"], *half])
    return times


def calibrate(
    reported: Sequence[Reported],
    loads: Mapping[int, Load],
    tokens: Sequence[int] = CALIBRATION,
    given: Rates | None = None,
) -> Rates:
    """The rates that fit the figures reported for `tokens` best; all other figures are left unread.

    loads  the work by T, for every T of `tokens`
    """
    start = given or Rates()
    figures = [figure for figure in reported if figure.tokens in tokens]
    stated = {count: works(loads[count]) for count in tokens}
    want = np.log([figure.us for figure in figures])

    def residual(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        rates = _with(start, x)
        times = {count: predict(loads[count], rates, stated[count]) for count in tokens}
        return np.log([times[figure.tokens][figure.name].us for figure in figures]) - want

    # Both are bends of the model, across which a fit does not find its way: start on every side, keep the best.
    sides = [replace(start, in_flight=threads, cache_mb=mb) for threads in STARTS_IN_FLIGHT for mb in STARTS_CACHE_MB]
    ends = [_least_squares(residual, np.log([getattr(side, name) for name in FITTED])) for side in sides]
    return _with(start, min(ends, key=lambda x: float(residual(x) @ residual(x))))


def _with(rates: Rates, logarithms: npt.NDArray[np.float64]) -> Rates:
    fitted: dict[str, Any] = {name: float(np.exp(x)) for name, x in zip(FITTED, logarithms, strict=True)}
    return replace(rates, **fitted)


def _least_squares(
    residual: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], x: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Levenberg and Marquardt's: damped Gauss-Newton steps, derivatives by differences."""
    step, damping = 1e-5, 1e-2
    now = residual(x)
    for _ in range(100):
        slopes = np.stack([(residual(x + step * unit) - now) / step for unit in np.eye(x.size)], axis=1)
        normal = slopes.T @ slopes
        damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
        moved = x + np.clip(np.linalg.solve(damped, -slopes.T @ now), -1.0, 1.0)
        then = residual(moved)
        gain = float(now @ now - then @ then)
        if gain > 0:
            x, now, damping = moved, then, damping / 3
            if gain < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return x
