"""What judging costs next to the forward pass: `python -m tests.verification.cost [--device cuda] [--json FILE]`.

On a CPU: `tiny`, its own logits, chains of 8 drafted nodes of which 0.7 are what the target says (sampled from draft
distributions near the target's for `probabilistic`); forward and judging take turns, and the best of many runs counts.
On a GPU: random logits of 151,936 columns, as broad as --spread ("broad": thousands of tokens are likely) or with a
hundred tokens that stand out ("peaked", as a language model's do); the forward is not run, its time is given by
--forward-ms. There judging is timed twice: on a device that waits for it, and behind other work, as in service, where
the host prepares while the device computes: what it adds to the time of that work. Steps are arrays already, as a
verifier hands them over.
"""

import argparse
import copy
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from specq.protocol.params import SamplingParams
from specq.runtime.machine import describe
from specq.verification import StepBatch
from specq.verification.begun import begin
from specq.verification.devices import warm_up
from specq.verification.judge import judge_each
from tests.verification.workload import Tiny, chains

SAMPLERS = {
    "T=0": {},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top_p=0.9": {"temperature": 0.8, "top_p": 0.9},
}
STRATEGIES = ("deterministic", "probabilistic", "threshold", "typical", "greedy")
VOCAB = 151_936
BUSY_MS = 3.0  # of other work before judging
FORWARD_MS = 9.6  # 32 sessions of 9 rows, a 7B shape on one H200


def tell(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def milliseconds(function, *arguments, clock=time.thread_time):
    """By default of the thread's processor time, so that other work on the machine counts less."""
    started = clock()
    function(*arguments)
    return (clock() - started) * 1e3


def judge_batch(batch, logits):
    """As the torch engine does: on a GPU in two halves."""
    batch = copy.copy(batch)  # without the objects that a judgement before may have made of it
    return begin(batch, logits).finish() if logits.is_cuda else judge_each(batch, logits)


def record(sessions, strategy, sampler, forward_ms, judge_ms, judgements, **more):
    accepted = float(np.mean([len(judgement.path) for judgement in judgements]))
    share = judge_ms / forward_ms
    name = f"{sessions:3} sessions  {strategy:14} {sampler:16}"
    behind = (
        f"  behind work {more['behind_ms']:7.3f} ms  {more['behind_ms'] / forward_ms:6.1%}"
        if "behind_ms" in more
        else ""
    )
    tell(
        f"{name} forward {forward_ms:8.3f} ms  judging {judge_ms:7.3f} ms  {share:6.1%}{behind}  {accepted:.1f} "
        f"accepted"
    )
    return {"sessions": sessions, "strategy": strategy, "sampler": sampler, "forward_ms": round(forward_ms, 4),
            "judge_ms": round(judge_ms, 4), "share": round(share, 4), "accepted": accepted, **more}  # fmt: skip


def on_cpu(options):
    for sessions in options.sessions:
        tiny = Tiny(sessions, options.threads)
        for strategy in STRATEGIES:
            for name, sampler in SAMPLERS.items():
                params = SamplingParams(strategy=strategy, **sampler)
                steps = tiny.steps(params, options.nodes, np.random.default_rng(0))
                logits, batch = tiny.forward(steps), StepBatch.of(steps)
                times = [
                    (milliseconds(tiny.forward, steps), milliseconds(judge_batch, batch, logits))
                    for _ in range(options.repeats)
                ]
                forward, judging = np.min(times, axis=0)
                yield record(sessions, strategy, name, forward, judging, judge_batch(batch, logits))


def made_up(rows, spread, is_peaked):
    torch.manual_seed(0)
    logits = torch.randn(rows, VOCAB, device="cuda") * spread
    if is_peaked:
        at = torch.randint(VOCAB, (rows, 100), device="cuda")
        logits.scatter_(1, at, 12 + 3 * torch.randn(rows, 100, device="cuda"))
    return logits


class Work:
    """Products of matrices that take the device about BUSY_MS."""

    def __init__(self):
        self.matrices = torch.randn(3, 4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.count = 1
        took = min(milliseconds(self.alone, clock=time.perf_counter) for _ in range(20))
        self.count = max(int(BUSY_MS / took), 1)

    def begin(self):
        for _ in range(self.count):
            torch.mm(self.matrices[0], self.matrices[1], out=self.matrices[2])

    def alone(self):
        self.begin()
        torch.cuda.synchronize()

    def and_judging(self, batch, logits):
        self.begin()
        judge_batch(batch, logits)

    def adds(self, batch, logits, repeats):
        """Milliseconds that judging adds to the work, by the medians of both in turns."""
        times = [
            (milliseconds(self.alone, clock=time.perf_counter),
             milliseconds(self.and_judging, batch, logits, clock=time.perf_counter))
            for _ in range(repeats)
        ]  # fmt: skip
        alone, both = np.median(times, axis=0)
        return float(both - alone)


def on_cuda(options):
    work = Work()
    kinds = itertools.product((torch.bfloat16, torch.float32), options.sessions, (True, False))
    for dtype, sessions, is_peaked in kinds:
        spread = options.spread / 2 if is_peaked else options.spread
        logits = made_up(sessions * (options.nodes + 1), spread, is_peaked).to(dtype)
        of_kind = {"dtype": str(dtype).removeprefix("torch."), "logits": "peaked" if is_peaked else "broad"}
        tell(f"{of_kind['dtype']}, {of_kind['logits']}")
        warm_up(logits)
        for strategy, (name, sampler) in itertools.product(STRATEGIES, SAMPLERS.items()):
            params = SamplingParams(strategy=strategy, **sampler)
            steps = chains(sessions, options.nodes, logits, params, np.random.default_rng(0))
            torch.cuda.synchronize()
            batch = StepBatch.of(steps)
            first = milliseconds(judge_batch, batch, logits, clock=time.perf_counter)
            times = [milliseconds(judge_batch, batch, logits, clock=time.perf_counter) for _ in range(options.repeats)]
            of_run = {"first_ms": round(first, 3), "median_ms": round(float(np.median(times)), 4)}
            of_run["behind_ms"] = round(work.adds(batch, logits, options.repeats), 4)
            judgements = judge_batch(batch, logits)
            yield record(sessions, strategy, name, options.forward_ms, min(times), judgements, **of_kind, **of_run)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of made-up logits")
    parser.add_argument("--forward-ms", type=float, default=FORWARD_MS, help="on a GPU: what a forward takes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        records = list((on_cuda if options.device == "cuda" else on_cpu)(options))
    if options.json is not None:
        report = describe(" ".join(("python -m tests.verification.cost", *sys.argv[1:])))
        if options.device == "cuda":
            report["machine"]["gpu"] = torch.cuda.get_device_name()
        options.json.write_text(json.dumps(report | {"judging": records}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
