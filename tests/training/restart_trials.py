"""`make faults`: a run is struck at a random moment, and must come to the result of a run that never was.

    python tests/training/restart_trials.py --number 20 --record benchmarks/results/restarts.json

Each trial is one small run of `rda train --ranks 2 --restarts`, of one torchrun, or of two torchruns that meet at a
store of their own. What does not go on by itself must have said why, and the same command must go on. The exit status
is 1 unless all trials pass.

Most of a trial is Python that starts and imports torch. In two trials of five the processes are forked from one that
has imported it, and ranks start in a tenth of a second: faults fall on other moments then.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # for what tests share

from distributed import start_server
from forked import ForkedLauncher
from helpers import TEXT, TINY, free_port
from kept_record import add_record, kept_record
from safetensors import safe_open

from ring_dilated_attention.models.saved_run import find_checkpoint, step_of

# float32, since losses of two ranks are compared with those of three: some processors multiply in bfloat16 by default,
# where matrices of other shapes are rounded otherwise, and first losses differ by 3e-5.
OPTIONS = f"{TINY} --warmup-steps 2 --save-every 5 --dtype float32 --data text.txt --run-folder run"
KINDS = ("worker", "rank 0", "two", "agent", "writing", "restarting", "stop", "disk", "fsdp")
# Of the first strike: after a step (in a test after that many), while ranks start, or in the report after the last one.
# "stop" and other kinds are bound to steps.
MOMENTS = ("step", "step", "start", "step", "report")
AT_ANY_MOMENT = ("worker", "rank 0", "two", "agent")
# A torchrun whose ranks have finished waits for the torchruns of other hosts, and 300 s if one was killed just then.
# So long, too, its ranks look for the store of the first rank, if its torchrun was killed just before they start.
ORPHAN_SECONDS, MOST_SECONDS = 60, 700
# docs/reliability.md: a rank that is younger when torchrun is killed may not notice. Under load, tenths are seconds.
YOUNG_SECONDS = 2
STEPS_OF_ORPHANS = 15  # ranks look for their parent every 50 ms: they do fewer steps without it
TRAIN = ("-m", "ring_dilated_attention", "train")
STORE = str(Path(__file__).parents[2] / "examples" / "launch" / "store.py")


class Size(NamedTuple):
    """Of a run, with its --timeout and --restarts."""

    steps: int = 60
    timeout: int = 5
    restarts: int = 4


class Trial(NamedTuple):
    """What came of faults. `complaints` is empty if everything is as it must be.

    outcome: "went on", or "the same command went on".
    ended: the seconds until no process was left whose launcher was killed.
    """

    outcome: str
    seconds: float
    ended: float | None
    complaints: list[str]


class Result(NamedTuple):
    """What a run comes to."""

    losses: list[float]
    held_out: float
    tensors: bytes  # of the parameters and of the optimisers' state


def started(words, said, environment):
    """A process of Python with these words. What it says goes to a file."""
    with said.open("ab") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, env=environment)


class TrainingJob:
    """A command that trains in the present folder, and its processes."""

    def __init__(self, launcher, size, start=started, *options):
        """options: of `rda train`, more than all trials have."""
        self.launcher, self.size, self.start, self.options = launcher, size, start, options
        self.said = Path("said.txt")
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/launching.md says
        self.num_ranks = 2
        self.heads = []  # the launcher, or the agents
        # all processes of ranks that were seen, and when each began
        self.known = {}
        self.said_before = 0  # how many bytes had been said when a rank was first seen
        # at the moment when it lost it
        self.has_lost_head, self.steps_left, self.may_train_on = False, 0, False
        self.store = None

    def begin(self):
        self.has_lost_head, self.disk = False, ""  # how it is full
        size = self.size
        options = f"{OPTIONS} --steps {size.steps} --timeout {size.timeout}"
        words = [*TRAIN, *options.split(), *self.options]
        run = f"-m torch.distributed.run --max-restarts {size.restarts}"
        if self.launcher == "rda":
            commands = [[*words, "--ranks", str(self.num_ranks), "--restarts", str(size.restarts)]]
        elif self.launcher == "torchrun":
            run += f" --standalone --nproc-per-node {self.num_ranks}"
            commands = [[*run.split(), *words]]
        else:
            port = free_port()
            self.store = self.start([STORE, port], self.said, self.environment)
            run += " --nnodes 1:2 --nproc-per-node 1 --rdzv-id job --rdzv-backend c10d"
            run += f" --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1"
            run += " --rdzv-conf is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
            commands = [[*run.split(), *words]] * 2
        self.heads = [self.start(command, self.said, self.environment) for command in commands]

    def ranks(self):
        """The living ranks, in the order of their start."""
        found = {pid: began(pid) for head in self.heads for pid in children(head.pid)}
        if not self.known.items() >= found.items():
            self.known |= found
            self.said_before = self.said.stat().st_size
        return sorted(found, key=lambda pid: (found[pid], pid))

    def said_by_the_last(self):
        """What was said since the ranks were last started."""
        return self.said.read_bytes()[self.said_before :].decode(errors="replace")

    def end(self, seconds=MOST_SECONDS):
        """The exit codes, once all launchers have ended. Those that do not end in time have none, and are killed."""
        deadline = time.monotonic() + seconds
        while any(head.poll() is None for head in self.heads) and time.monotonic() < deadline:
            self.ranks()
            time.sleep(0.05)
            if self.disk == "full":
                self.fill_disk()  # an older checkpoint may have gone
        codes = [head.poll() for head in self.heads]
        self.kill(head.pid for head in self.heads if head.poll() is None)
        return codes

    def wait_until(self, condition, seconds=MOST_SECONDS):
        """Whether the condition came true while a launcher was running."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or all(head.poll() is not None for head in self.heads):
                return False
            time.sleep(0.005)
        return True

    def kill(self, pids, number=signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def lose_head(self, rng):
        """Kill the launcher, or one of the agents."""
        self.has_lost_head, self.steps_left = True, self.size.steps - steps_done()
        self.may_train_on = self.launcher == "torchrun" and any(map(is_young, self.ranks()))
        lost = rng.choice(self.heads)
        self.kill([lost.pid])
        while lost.poll() is None:  # until then its ranks are no orphans
            time.sleep(0.001)

    def lose_disk(self, rank):
        """Let the disk be full, if `run` is a small one of its own. Else no file of this rank may grow much."""
        self.disk = "full" if Path("run").is_mount() else "limit"
        if self.disk == "full":
            self.fill_disk()
        else:
            most = Path("run/metrics.jsonl").stat().st_size + 3_000
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def fill_disk(self):
        with suppress(OSError), Path("run/filler").open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def orphans(self):
        """The processes in the present folder that no living launcher has started."""
        heads = [head.pid for head in self.heads if head.poll() is None]
        known = {os.getpid(), *heads, *(pid for head in heads for pid in children(head))}
        if self.store is not None:
            known.add(self.store.pid)
        here = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_here(name)]
        return [pid for pid in here if pid not in known and stat_of(pid)]

    def clear(self):
        # Linux soon gives the number of a process that has ended to another one, of another command of the user's.
        self.kill(pid for pid, start in self.known.items() if began(pid) == start)
        self.kill(head.pid for head in self.heads if head.poll() is None)
        if self.store is not None:
            self.kill([self.store.pid])
            self.store = None
        Path("run/filler").unlink(missing_ok=True)
        for head in self.heads:
            while head.poll() is None:
                time.sleep(0.01)


def stat_of(pid):
    """The fields of a living process behind its name: its state ("T" if it is stopped), its parent, and others."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
    except OSError:
        return []
    return fields if fields[0] != "Z" else []


def began(pid):
    """When a living process began; 0 if it has ended."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def is_young(pid):
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    return seconds - began(pid) / os.sysconf("SC_CLK_TCK") < YOUNG_SECONDS


def children(pid):
    """The living processes that a process has started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [child for child in map(int, found) if stat_of(child)]


def is_here(pid):
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == Path.cwd()
    except OSError:  # it has ended
        return False


def steps_done():
    path = Path("run/metrics.jsonl")
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest_step():
    newest = find_checkpoint(Path("run"))
    return step_of(newest) if newest else 0


def result():
    """What the run came to; None if it is not complete."""
    path = Path("run/record.json")
    record = json.loads(path.read_bytes()) if path.exists() else {}
    if record.get("status") != "complete":
        return None
    found = []  # which rank writes a tensor that all have may differ, so tensors are sorted by their names
    for path in Path(f"run/checkpoint-{record['step']:06d}").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            found += [(name, path.name, file.get_tensor(name).tobytes()) for name in file.keys()]  # noqa: SIM118
    tensors = b"".join(content for _, _, content in sorted(found))
    return Result(record["bits_per_byte"], record["held_out_bits_per_byte"], tensors)


# Faults. Each returns whether it struck.


def unfinished():
    """The files of checkpoints that have no name yet."""
    found = []
    for folder in Path("run").glob("unfinished-checkpoint-*"):
        with suppress(FileNotFoundError):  # it got its name just now
            found += [path for path in folder.iterdir() if path.is_file()]
    return found


def strike_writing(job, rng):
    """Kill a rank during a write. Ranks are stopped before, and one is killed only if a write has begun and not ended.

    With --fsdp each rank writes. Otherwise the first does, and the other waits for it.
    """
    while job.wait_until(unfinished):
        time.sleep(rng.choice([0, rng.uniform(0, 0.02)]))
        ranks = job.ranks()
        job.kill(ranks, signal.SIGSTOP)
        while any(stat_of(pid)[:1] not in (["T"], []) for pid in ranks):
            time.sleep(0.001)
        if is_struck := bool(unfinished()):
            job.kill([rng.choice(ranks)])
        job.kill(ranks, signal.SIGCONT)
        if is_struck:
            return True  # otherwise it came too late: the next checkpoint
    return False


def wait_for(job, moment, rng):
    """Whether the moment of the first strike came."""
    if moment == "start":
        is_there = job.wait_until(lambda: len(job.ranks()) == job.num_ranks)
    else:
        steps = {"report": job.size.steps, "step": rng.randrange(1, job.size.steps - 15)}
        is_there = job.wait_until(partial(is_running, job, steps.get(moment, moment)))
    longest = 0.4 if moment == "start" else 0.03
    if job.start is started and moment in ("start", "report"):
        longest *= 10
    time.sleep(rng.uniform(0, longest))
    return is_there


def strike(job, kind, moment, rng):
    if not wait_for(job, moment, rng):
        return False
    if kind == "writing":
        return strike_writing(job, rng)
    if not (ranks := job.ranks()):
        return False
    first, second = ranks[0], ranks[-1]
    if kind == "disk":
        job.lose_disk(first)
    elif kind == "stop":
        job.kill([rng.choice([first, second])], signal.SIGSTOP)
    elif kind == "agent":
        job.lose_head(rng)
    else:
        struck = {"worker": [second], "rank 0": [first], "two": [first, second]}
        job.kill(struck.get(kind, [rng.choice([first, second])]))
    if kind == "restarting":
        before = set(job.known)
        if not job.wait_until(lambda: set(job.ranks()) - before):
            return False
        # Soon after they begin: a run that is fast would otherwise be at its end, and never be struck again.
        soon = partial(is_running, job, newest_step() + 5)
        job.wait_until(soon, rng.uniform(0, 0.6 * job.size.timeout))
        new = sorted(set(job.ranks()) - before)
        if not new or rng.random() < 0.3:
            job.lose_head(rng)
        else:
            job.kill([rng.choice(new)])
    return True


def run_trial(faults, job, rng, whole, ranks_at_last=2):
    """Strike a run in the present folder, by each kind at its moment, and judge what it comes to.

    ranks_at_last: how many ranks the same command has, where it must go on.
    """
    Path("text.txt").write_bytes(TEXT)
    complaints = []
    ended = None
    start, outcome = time.monotonic(), "went on"
    try:
        if "disk" in faults:
            mount_small_disk()
        job.begin()
        for number, (kind, moment) in enumerate(faults.items(), start=1):
            if not strike(job, kind, moment, rng):
                complaints.append(f"the fault {kind} never came")
            struck, kept = time.monotonic(), newest_step()
            if job.has_lost_head:
                while job.orphans() and time.monotonic() < struck + ORPHAN_SECONDS:
                    time.sleep(0.1)
                ended = time.monotonic() - struck
                if job.orphans():
                    complaints.append(f"ranks ran {ORPHAN_SECONDS} s without their launcher")
                if job.launcher != "two agents" and job.steps_left >= STEPS_OF_ORPHANS:
                    if result() is not None and not job.may_train_on:
                        complaints.append("ranks trained to the end without their launcher")
                    if kind == "agent" and moment != "start" and newest_step() < steps_done():
                        complaints.append("ranks that lost their launcher did not save")
            elif kind != "disk" and number < len(faults):
                continue  # the next one strikes the same command
            if None in job.end():
                complaints.append(f"no end within {MOST_SECONDS} s")
            if result() is None:
                outcome = "the same command went on"
                said = job.said_by_the_last()
                # nobody is left to say it if the launcher was killed before its ranks had begun
                can_say_it = not job.has_lost_head or "the document has" in said
                if can_say_it and not re.search("rda train: (?!waiting)", said):
                    complaints.append("it stopped without a sentence")
                job.clear()
                if newest_step() < kept:
                    complaints.append(f"of checkpoints at {kept}, {newest_step()} is the newest")
                job.num_ranks = ranks_at_last
                job.begin()
        if None in job.end():
            complaints.append("the last command did not end")
        said = job.said.read_text(errors="replace")
        complaints += judge(whole, result(), step_of_others())
        if "writing" in faults:
            complaints += [f"{path} was left" for path in Path("run").rglob("*unfinished-*")]
    finally:
        job.clear()
        if Path("run").is_mount():
            subprocess.run(["umount", "--lazy", "run"], check=True)
    if complaints:
        complaints.append(said[-3000:])
    return Trial(outcome, time.monotonic() - start, ended, complaints)


def mount_small_disk():
    """A disk of its own for the run, if this user may mount one."""
    Path("run").mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "run"]
    if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
        Path("run").rmdir()


def step_of_others():
    """The first step that not two ranks did."""
    path = Path("run/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return next((i for i, step in enumerate(steps) if len(step["resident_bytes"]) != 2), None)


def judge(whole, found, first):
    """What is wrong with a result. It must be equal to the bit, until not two ranks did the `first` step."""
    if found is None:
        return ["the run is not complete"]
    is_equal = found == whole
    if first is not None:
        is_equal = (
            found.losses[:first] == whole.losses[:first]
            and abs(found.losses[first] - whole.losses[first]) < 1e-5
            and abs(found.held_out / whole.held_out - 1) < 0.01
        )
    return [] if is_equal else [f"another result, from step {first}"]


def whole_result(job):
    """The result of a run in the present folder that is never struck."""
    Path("text.txt").write_bytes(TEXT)
    try:
        job.begin()
        job.end()
    finally:
        job.clear()
    found = result()
    assert found is not None, job.said.read_text(errors="replace")
    return found


def is_running(job, step):
    return steps_done() >= step and len(job.ranks()) == job.num_ranks


def in_folder(folder, function, *args):
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        return function(*args)
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def setting_of(kind, number):
    """Of a trial: its launcher, the moment, whether it has --fsdp, and whether its processes are forked."""
    launcher = "torchrun" if number % 4 == 3 else "rda"
    if kind == "agent":
        launcher = ("rda", "two agents", "torchrun", "two agents")[number % 4]
    moment = MOMENTS[number % len(MOMENTS)] if kind in AT_ANY_MOMENT else "step"
    # In the report a torchrun that is left waits 300 s for the other: too long for trials.
    if launcher == "two agents" and moment == "report":
        moment = "step"
    is_sharded = kind == "fsdp" or (kind == "writing" and number % 2 == 1)
    # Of each four trials, which have all launchers, all are forked or none.
    return launcher, moment, is_sharded, number // 4 % 2 == 1


def numbered_trial(folder, seed, kind, wholes, number):
    """wholes: of a run without --fsdp, and of one with it."""
    launcher, moment, is_sharded, is_forked = setting_of(kind, number)
    options = ["--fsdp"] if is_sharded else []
    job = TrainingJob(launcher, Size(), ForkedLauncher if is_forked else started, *options)
    rng = random.Random(f"{seed} {kind} {number}")
    arguments = ({kind: moment}, job, rng, wholes[is_sharded])
    return in_folder(folder / f"trial-{number}", run_trial, *arguments)


def row_of(kind, trials):
    ended = [trial.ended for trial in trials if trial.ended is not None]
    went_on = [trial.outcome for trial in trials].count("went on")
    return {
        "kind": kind,
        "number": len(trials),
        "went_on": went_on,
        "went_on_by_the_same_command": len(trials) - went_on,
        "failed": sum(bool(trial.complaints) for trial in trials),
        "median_seconds": round(statistics.median(trial.seconds for trial in trials), 1),
        "most_seconds_of_orphans": round(max(ended), 1) if ended else None,
        "complaints": [x for trial in trials for x in trial.complaints[:-1]],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, default=random.randrange(10**6))
    add("--number", type=int, default=20, help="trials of each kind, and half as many of fsdp")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS)
    add(
        "--at-once", type=int, default=2, help="trials at a time: most of a trial waits (default 2)"
    )
    add_record(parser)
    arguments = parser.parse_args()
    about = {"seed": arguments.seed, "at_once": arguments.at_once}
    keep = kept_record(
        parser, arguments.record, "restarts", "tests/training/restart_trials.py", **about
    )
    print(f"seed {arguments.seed}")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that others are forked from
    start = time.monotonic()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="rda-trials-") as folder,
        # Each has a present folder of its own. What it forks from starts in the clone, and finds what it imports.
        ProcessPoolExecutor(arguments.at_once, initializer=start_server) as pool,
    ):
        wholes = [
            in_folder(
                Path(folder, "whole"), whole_result, TrainingJob("rda", Size(), started, *options)
            )
            for options in ([], ["--fsdp"])
        ]
        for kind in arguments.kinds:
            one = partial(numbered_trial, Path(folder), arguments.seed, kind, wholes)
            # such a run takes twice as long, and half of `writing` are with --fsdp too
            num_trials = -(-arguments.number // 2) if kind == "fsdp" else arguments.number
            trials = []
            for number, trial in enumerate(pool.map(one, range(num_trials))):
                trials.append(trial)
                launcher, moment, *_ = setting_of(kind, number)
                print(f"{number:3}  {kind}, {launcher} {moment}, {trial.seconds:.1f} s", end="  ")
                print("\n     ".join([trial.outcome, *trial.complaints]), flush=True)
            rows.append(row_of(kind, trials))
            keep(rows, seconds=round(time.monotonic() - start))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
