"""Options of plan, bench and generate."""

from collections.abc import Iterator

from benchmarks.bad_inputs.case import PLAN, Case, Outcome

AREA = "options"
PLANS: tuple[tuple[int, str, str], ...] = (
    (708, "--gpus", "0"),
    (709, "--gpus", "-1"),
    (710, "--gpus", "1000000000"),
    (711, "--vram", "0B"),
    (712, "--vram", "x"),
    (713, "--vram", "1e5TiB"),
    (714, "--pcie", "-1GB/s"),
    (715, "--pcie", "0GB/s"),
    (716, "--pcie", "nan"),
    (717, "--host", "0"),
    (718, "--tflops", "nan"),
    (719, "--tflops", "inf"),
    (720, "--tflops", "0"),
    (721, "--tflops", "-1"),
    (722, "--card", "nosuch"),
    (723, "--card", ""),
    (724, "--show-data", "-1"),
    (725, "--svg", "model"),
    (726, "--svg", "/proc/x"),
    (727, "--svg", "nodir/x.svg"),
    (728, "--trace", "/dev/full"),
    (729, "--svg", "data.jsonl"),
    (730, "--svg", "r.toml"),
)
SHORT = ("--max-new-tokens", "3")
# Number, name, arguments after the model, outcome, and what a refusal names.
GENERATED: tuple[tuple[int, str, tuple[str, ...], Outcome, str], ...] = (
    (888, "empty prompt", ("--prompt", "", *SHORT), "either", ""),
    (889, "empty raw prompt", ("--prompt", "", "--raw", *SHORT), "either", "prompt"),
    (890, "undefined temperature", ("--prompt", "a", "--temperature", "nan", *SHORT), "refused", "--temperature"),
    (891, "infinite temperature", ("--prompt", "a", "--temperature", "inf", *SHORT), "refused", "--temperature"),
    (892, "negative temperature", ("--prompt", "a", "--temperature", "-1", *SHORT), "refused", "--temperature"),
    (893, "temperature of 1e-300", ("--prompt", "a", "--temperature", "1e-300", *SHORT), "either", "--temperature"),
    (894, "temperature of 1e300", ("--prompt", "a", "--temperature", "1e300", *SHORT), "either", "--temperature"),
    (895, "10**12 tokens", ("--prompt", "a", "--max-new-tokens", str(10**12)), "refused", "--max-new-tokens"),
    (896, "10**30 tokens", ("--prompt", "a", "--max-new-tokens", str(10**30)), "refused", "--max-new-tokens"),
    (897, "no tokens", ("--prompt", "a", "--max-new-tokens", "0"), "refused", "--max-new-tokens"),
    (898, "negative seed", ("--prompt", "a", "--seed", "-1", *SHORT), "refused", "--seed"),
    (899, "seed of 2**63", ("--prompt", "a", "--seed", str(2**63), *SHORT), "refused", "--seed"),
    (900, "prompt that is not UTF-8", ("--prompt", "\udcff", *SHORT), "refused", "prompt"),
    (901, "prompt of 100,000 characters", ("--prompt", "a" * 100_000, *SHORT), "either", "prompt"),
    (902, "no prompt", (), "refused", "prompt"),
    (903, "prompt of end tokens", ("--prompt", "<|end|>" * 10, *SHORT), "either", "prompt"),
    (904, "prompt with an escape sequence", ("--prompt", "\x1b[31m", *SHORT), "either", "prompt"),
)


def cases() -> Iterator[Case]:
    for number, option, value in PLANS:
        yield Case(
            number, AREA, f"plan {option} {value!r}", (*PLAN, "engine.devices=auto", option, value), names=option
        )
    weights = "model/model.safetensors"
    args = ("bench", "--config", "r.toml", "--steps", "1", "--warmup", "1", "--trace", weights)
    yield Case(887, AREA, "bench --trace over the weights", args, names="--trace")
    for number, name, given, expected, named in GENERATED:
        yield Case(number, AREA, f"generate: {name}", ("generate", "model", *given), expected, names=named)
