"""Drawings of time: lanes of work and waiting, versions of weights, a population."""

from docs.pictures.canvas import Canvas
from docs.pictures.style import INK, LEARNER, LINES, MEMORY, POLICY, ROLLOUT, SOFT, WAIT, WARN

LEFT, RIGHT = 150, 814  # where lanes begin and end


def lane(page: Canvas, y: float, name: str, height: float = 24) -> None:
    """Draw an idle lane; work is drawn upon it."""
    page.waits(LEFT, y, RIGHT - LEFT, height)
    page.words(LEFT - 10, y + height / 2, name, at="right")


def legend(page: Canvas, y: float, *entries: tuple[str, str]) -> None:
    """Explain colors, in one line that begins where lanes do."""
    x = LEFT
    for color, text in entries:
        page.box(x, y - 7, 14, 14, color, strength=1, round_=3, line=0)
        page.words(x + 20, y, text, at="left")
        x += 44 + 7.2 * len(text)


def why_asynchronous() -> Canvas:
    """Draw a loop of phases above processes that never wait for a phase."""
    page = Canvas(436)
    names = ("environments", "environments", "network acts", "learner")
    page.title(16, 22, "Synchronous: one kind of work at a time, the others wait")
    for row, name in enumerate(names):
        lane(page, 44 + 30 * row, name)
    for round_ in range(2):
        x = LEFT + 332 * round_
        for step in range(4):
            page.bar(x, 44, 26, 24, ROLLOUT)
            page.bar(x, 74, 18 + 4 * (step % 2), 24, ROLLOUT)  # the faster one waits for the slower one
            page.bar(x + 26, 104, 14, 24, POLICY)
            x += 40
        page.bar(x, 134, 172, 24, LEARNER, "learns")
    page.time(LEFT, RIGHT, 170)
    page.line((16, 206), (814, 206))
    page.title(16, 232, "Asynchronous: each kind of work in processes of its own")
    for row, name in enumerate(("rollout worker", "rollout worker", "policy worker", "learner")):
        lane(page, 254 + 30 * row, name)
    for row, offset in ((0, 0), (1, 17)):
        x = LEFT + offset
        while x + 26 <= RIGHT:
            page.bar(x, 254 + 30 * row, 26, 24, ROLLOUT)
            page.bar(x + 27, 314, 13, 24, POLICY) if x + 40 <= RIGHT else None
            x += 42 - 8 * (row == 1 and int(x) % 3 == 0)
    for batch in range(3):
        page.bar(LEFT + 140 + 174 * batch, 344, 172, 24, LEARNER, "learns")
    page.time(LEFT, RIGHT, 380)
    legend(page, 418, (ROLLOUT, "steps"), (POLICY, "acts"), (LEARNER, "learns"), (WAIT, "waits"))
    return page


def double_buffering() -> Canvas:
    """Draw one worker with two splits, and with one."""
    page = Canvas(380)
    step, act = 52, 40
    dark, light = ROLLOUT, "#56b4e9"
    page.title(16, 22, "Two splits: while the actions of one are computed, the worker steps the other")
    lane(page, 44, "rollout worker")
    lane(page, 76, "policy worker")
    for number in range(12):
        x = LEFT + step * number
        page.bar(x, 44, step - 2, 24, (dark, light)[number % 2], "AB"[number % 2], size=12)
        page.bar(x + step, 76, act, 24, POLICY, "AB"[number % 2], size=12) if number < 12 else None
    for number in range(2, 5):
        x = LEFT + step * (number - 1)
        page.arrow((x + act, 80), (x + step + 3, 66), line=1.2, corner=0)
    page.time(LEFT, RIGHT, 112)
    page.words(LEFT, 128, "12 steps of half the environments, and the next actions are always there", at="left",
               color=SOFT)
    page.line((16, 152), (814, 152))
    page.title(16, 178, "One split: the worker waits for every action")
    lane(page, 200, "rollout worker")
    lane(page, 232, "policy worker")
    x, number = LEFT, 0
    while x + 2 * step <= RIGHT:
        page.bar(x, 200, 2 * step - 2, 24, dark, "A and B", size=12)
        width = min(1.5 * act, RIGHT - x - 2 * step)
        page.bar(x + 2 * step, 232, width, 24, POLICY, "A and B" if width > 50 else "", size=12)
        x += 2 * step + 1.5 * act
        number += 1
    page.time(LEFT, RIGHT, 268)
    page.words(LEFT, 284, "each answer is for twice as many, which takes less than twice as long", at="left",
               color=SOFT)
    legend(page, 322, (dark, "steps split A"), (light, "steps split B"), (POLICY, "acts"), (WAIT, "waits"))
    page.words(LEFT, 354, "Who has all cores busy anyway gains nothing: without a GPU one split is the default.",
               at="left", color=SOFT)
    return page


def policy_lag() -> Canvas:
    """Draw the versions that acted in a trajectory, and the version that is trained when its turn comes."""
    page = Canvas(366)
    step, first = 60, 5
    page.title(16, 22, "Policy lag: by how many SGD steps the data is older than the policy that learns from it")
    page.words(LEFT - 10, 66, "learner:\nSGD steps", at="right")
    for number in range(11):
        x = LEFT + step * number
        version = first + number
        page.bar(x, 50, step - 3, 32, LEARNER, f"{version} \N{RIGHTWARDS ARROW} {version + 1}")
    page.words(LEFT - 10, 132, "policy worker:\nversion it acts with", at="right")
    for number in range(11):
        x = LEFT + step * number + 14
        width = min(step - 3, RIGHT - x)
        page.bar(x, 116, width, 32, POLICY, str(first + number))
        page.arrow((x - 14, 82), (x + 2, 114), color=SOFT, line=1.2, corner=0)
    page.words(LEFT - 10, 206, "one trajectory:\nversion of each row", at="right")
    begin = LEFT + 2 * step + 14
    for row in range(9):
        page.box(begin + 19.5 * row + 1, 190, 18, 32, POLICY, str(7 + row // 3), strength=0.25, size=11, round_=2,
                 line=1)
    page.arrow((begin + 180, 206), (LEFT + 6 * step - 4, 206), color=MEMORY, line=2.4)
    page.words(begin + 250, 240, "copied during the last SGD\nstep of the dataset before", size=11, color=MEMORY)
    x = LEFT + 6 * step
    page.box(x, 190, 4 * step - 3, 32, LEARNER, "trained on, from version 11 on", strength=0.2)
    page.line((x, 82), (x, 190), color=LEARNER, line=1.6, dashed=True)
    page.words(LEFT - 10, 288, "lag of each row", at="right")
    for row in range(9):
        page.box(begin + 19.5 * row + 1, 272, 18, 32, WARN, str(4 - row // 3), strength=0.12, size=11, round_=2, line=1)
    page.words(begin + 190, 288, "= 11 - the version that acted", at="left")
    page.arrow((begin + 88, 226), (begin + 88, 268), color=SOFT, line=1.2)
    page.time(LEFT, RIGHT, 332)
    return page


def population() -> Canvas:
    """Draw policies that copy the best and mutate, and agents that draw who they play."""
    page = Canvas(420)
    page.title(16, 22, "Population-based training: the worst become copies of the best, then settings mutate")
    updates, height = (210, 420, 630), 40
    for number in range(4):
        y = 62 + height * number
        page.words(34, y, f"p{number}", bold=True, color=LINES[number], size=14)
        page.line((60, y), (814, y), color=LINES[number], line=4)
        if number:  # the first one begins with the settings of the command line
            page.circle(74, y, 7, INK, strength=0)
            page.words(74, y, "~", bold=True)
    for x, (donor, worst, mutated) in zip(updates, ((2, 1, 3), (1, 3, 2), (2, 1, 3)), strict=True):
        top, bottom = 62 + height * donor, 62 + height * worst
        sign = 1 if bottom > top else -1
        page.arrow((x, top), (x, bottom - 11 * sign), color=LINES[donor], line=2.4)
        page.circle(x, bottom, 9, WARN, strength=0)
        page.words(x, bottom, "\N{MULTIPLICATION SIGN}", color=WARN, bold=True)
        for place, policy in ((x + 20, worst), (x + 90, mutated)):
            page.circle(place, 62 + height * policy, 7, INK, strength=0)
            page.words(place, 62 + height * policy, "~", bold=True)
    page.time(60, 814, 212, "env_steps of the policies")
    page.circle(70, 240, 9, WARN, strength=0)
    page.words(70, 240, "\N{MULTIPLICATION SIGN}", color=WARN, bold=True)
    page.words(86, 240, "becomes a copy", at="left")
    page.circle(280, 240, 7, INK, strength=0)
    page.words(280, 240, "~", bold=True)
    page.words(294, 240, "learning rate, loss coefficients, reward shaping change a little", at="left")
    page.line((16, 264), (814, 264))
    page.title(16, 290, "When an episode begins, each agent draws the policy that it plays")
    for match, (left, right) in enumerate((("p0", "p2"), ("p3", "p1"), ("p2", "p2 of old"))):
        x = 30 + 268 * match
        page.box(x, 314, 234, 52, SOFT, strength=0.06)
        for place, name in ((x + 12, left), (x + 134, right)):
            color = LINES[int(name[1])]
            page.box(place, 324, 88, 32, color, name, strength=0.25, bold=True, dashed="old" in name)
        page.words(x + 117, 340, "vs.", color=SOFT)
    page.note(392, "With self-play some opponents are frozen past selves; nobody learns from what these do.")
    return page


def speed() -> Canvas:
    """Draw where the time of a batch goes on a CPU and on a GPU."""
    page = Canvas(430)
    page.title(16, 22, "On a CPU a batch is arithmetic, so the time grows with its size")
    for row, (name, size) in enumerate((("small batch", 40), ("large batch", 156))):
        y = 46 + 34 * row
        page.words(LEFT - 10, y + 12, name, at="right")
        x = LEFT
        for _ in range(4):
            page.bar(x, y, 4, 24, WARN)
            page.bar(x + 5, y, size, 24, LEARNER, "computes" if size > 60 else "")
            x += size + 7
    page.line((16, 128), (814, 128))
    page.title(16, 152, "On a GPU a batch is launches and a wait, almost whatever its size")
    for row, (name, size) in enumerate((("small batch", 5), ("large batch", 30))):
        y = 176 + 84 * row
        page.words(16, y + 28, name, at="left")
        end = LEFT + 41 * 9 + 39 + size
        for lane_y, text in ((y, "CPU"), (y + 30, "GPU")):
            page.words(LEFT - 10, lane_y + 12, text, at="right")
            page.waits(LEFT, lane_y, end - LEFT, 24)
        for launch in range(10):
            x = LEFT + 41 * launch
            page.bar(x, y, 38, 24, WARN)
            page.bar(x + 39, y + 30, size, 24, LEARNER)
        page.line((end, y + 54), (end, y - 4), color=INK, line=1.6, dashed=True, zorder=4)
        page.words(end + 10, y + 12, "the result is there", at="left")
    page.time(LEFT, RIGHT, 346, "time, schematic")
    legend(page, 386, (WARN, "launch: a CPU starts an operator"), (LEARNER, "arithmetic"), (WAIT, "waits"))
    page.words(LEFT, 412, "So: on a CPU save arithmetic; on a GPU large batches, few launches, fewer waits.", at="left",
               color=SOFT)
    return page
