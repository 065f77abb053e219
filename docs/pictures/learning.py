"""Drawings of what is learned from a trajectory: targets, the clip, ends, memory, units, algorithms."""

import matplotlib as mpl
import numpy as np

from docs.pictures.canvas import PIXEL, WIDTH, Canvas
from docs.pictures.style import INK, LEARNER, MEMORY, POLICY, ROLLOUT, SETTINGS, SOFT, WAIT, WARN

ARROW, MINUS, TIMES = "\N{RIGHTWARDS ARROW}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
RATIO, GAMMA, DELTA, RHO, PI, MU, LAMBDA = "\u03c0/\u03bc", "\u03b3", "\u03b4", "\u03c1", "\u03c0", "\u03bc", "\u03bb"


def vtrace() -> Canvas:
    """Draw how five temporal differences make one target: the numbers of the walkthrough's example."""
    page = Canvas(424)
    page.title(16, 22, "V-trace: what each later step adds to the target of the first one, vs\u2080")
    ratios, rewards = ("1", "2", "1/2", "1", "1/2"), ("1", "2", "3", "1", "0")
    deltas = ("0", "1", "1", "0", f"{MINUS}1/2")
    weights = ((1, "1"), (1 / 2, f"{GAMMA} c\u2080 = 1/2"), (1 / 4, f"{GAMMA}\u00b2 c\u2080c\u2081 = 1/4"),
               (1 / 16, f"{GAMMA}\u00b3 c\u2080c\u2081c\u2082 = 1/16"),
               (1 / 32, f"{GAMMA}\u2074 c\u2080c\u2081c\u2082c\u2083 = 1/32"))
    for y, text in ((66, "values"), (124, "ratio"), (160, f"cut at 1: {RHO} = c"), (212, f"TD error {DELTA}"),
                    (286, "weight in vs\u2080")):
        page.words(16, y, text, at="left", color=SOFT)
    for t in range(6):
        x = 150 + 124 * t
        page.circle(x, 66, 19, LEARNER, "2", strength=0.2)
        page.words(x, 96, f"V(x{chr(0x2080 + t)})", size=11, color=SOFT)
        if t == 5:
            break
        middle = x + 62
        page.arrow((x + 20, 66), (x + 103, 66), color=SOFT)
        page.words(middle - 2, 54, f"r = {rewards[t]}", size=12)
        page.words(middle, 124, f"{RATIO} = {ratios[t]}")
        is_cut = ratios[t] == "2"
        page.box(middle - 27, 148, 54, 24, WARN if is_cut else SOFT, f"2 {ARROW} 1" if is_cut else ratios[t],
                 strength=0.15 if is_cut else 0, bold=is_cut)
        page.box(middle - 50, 196, 100, 32, LEARNER, f"{DELTA}{chr(0x2080 + t)} = {deltas[t]}", bold=True)
        weight, text = weights[t]
        for top, bottom in ((229, 274), (299, 334)):
            page.line((middle, top), (middle, bottom), color=LEARNER, line=1 + 15 * weight)
        page.words(middle, 286, text)
    page.box(150, 334, 620, 34, LEARNER, f"vs\u2080 = V(x\u2080) + 0 + 1/2 + 1/4 + 0 {MINUS} 1/64 = 2 + 0.734", size=14,
             bold=True)
    page.words(460, 396, f"{DELTA} = {RHO} (r + {GAMMA} V(x') {MINUS} V(x)),   here {GAMMA} = 1/2 and {LAMBDA} = 1.   "
               "One small ratio makes everything behind it count less.", color=SOFT)
    return page


def ppo_clip() -> Canvas:
    """Draw the clipped objective over the ratio, for a good action and for a bad one."""
    page = Canvas(356)
    page.title(16, 22, "PPO's clip: beyond the range nothing more can be gained, so nothing is learned")
    low, high = 1 / 1.1, 1.1
    ratio = np.linspace(0.8, 1.2, 401)
    for number, (advantage, text, flat) in enumerate((
            (1, "A > 0: the action should become likelier", (high, 1.2)),
            (-1, "A < 0: the action should become rarer", (0.8, low)))):
        with mpl.rc_context(SETTINGS | {"font.size": 12 * PIXEL}):
            axes = page.figure.add_axes(((70 + 400 * number) / WIDTH, 84 / 356, 320 / WIDTH, 190 / 356))
        page.words(70 + 400 * number, 62, text, at="left", bold=True)
        axes.axvspan(*flat, color=WAIT, linewidth=0, alpha=0.7)
        objective = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
        axes.plot(ratio, ratio * advantage, color=SOFT, linewidth=1, linestyle=(0, (3, 3)))
        axes.plot(ratio, objective, color=LEARNER, linewidth=2.4)
        axes.plot([1], [advantage], "o", color=INK, markersize=5)
        axes.set(xlim=(0.8, 1.2), xticks=(low, 1, high), xticklabels=("1/1.1", "1", "1.1"), yticks=(0.9 * advantage,
                 advantage, 1.1 * advantage), ylim=(advantage - 0.22, advantage + 0.22))
        axes.set_yticklabels(("0.9 A", "A", "1.1 A"))
        left = 70 + 400 * number
        page.words(left + 160, 304, f"ratio {RATIO} of the action", color=SOFT)
        x = left + 320 * (np.mean(flat) - 0.8) / 0.4
        page.words(x, 232, "no\ngradient")
    page.note(338, "green: the objective, which is raised.  dashed: without the clip.  dot: where the data was taken")
    return page


def observation(page: Canvas, x: float, y: float, text: str, color: str = ROLLOUT, *, strength: float = 0.2) -> None:
    """Draw an observation as a disc."""
    page.circle(x, y, 17, color, text, strength=strength, size=12)


def time_limits() -> Canvas:
    """Draw the two ends of an episode, and how the end lies in a trajectory."""
    page = Canvas(470)
    for number, (title, y) in enumerate((
            ("Terminated: nothing comes after", 22), ("Truncated: time is up, the game would have gone on", 134))):
        page.title(16, y, title)
        for t in range(3):
            observation(page, 60 + 110 * t, y + 46, f"x{chr(0x2080 + t)}")
            page.arrow((79 + 110 * t, y + 46), (148 + 110 * t, y + 46), color=SOFT)
            page.words(112 + 110 * t, y + 35, f"r{chr(0x2080 + t)}", size=12)
        if number == 0:
            page.circle(390, y + 46, 17, INK, "0")
            page.words(425, y + 46, f"target of x\u2082:  r\u2082 + {GAMMA} \u00b7 0", at="left", size=14, bold=True)
        else:
            observation(page, 390, y + 46, "x\u2083")
            page.words(425, y + 46, f"target of x\u2082:  r\u2082 + {GAMMA} \u00b7 V(x\u2083)", at="left", size=14,
                       bold=True)
            page.words(425, y + 70, "x\u2083 is the true final observation, not the first of the next episode",
                       at="left", color=SOFT)
    page.line((16, 236), (814, 236))
    page.title(16, 262, "In a trajectory: the environment resets one step later, and that row is masked")
    columns = ("x\u2081", "x\u2082", "x\u2083", "y\u2080", "y\u2081")
    rows = (("obs[t]", columns), ("actions[t]", ("a\u2081", "a\u2082", "ignored", "b\u2080", "b\u2081")),
            ("rewards[t]", ("r\u2081", "r\u2082", "", "q\u2080", "q\u2081")),
            ("truncated[t]", ("", "True", "", "", "")),
            ("valid[t]", ("True", "True", "False", "True", "True")), ("new_episode[t]", ("", "", "", "True", "")))
    for row, (name, cells) in enumerate(rows):
        y = 308 + 25 * row
        page.words(130, y + 11, name, at="right", size=12)
        for column, cell in enumerate(cells):
            masked = column == 2
            page.box(142 + 92 * column, y, 88, 22, SOFT if masked else ROLLOUT, cell,
                     strength=0.25 if masked and row else 0.12, line=1, round_=3,
                     bold=cell in ("False",) or (cell == "True" and row in (3, 5)))
    page.arrow((616, 292), (370, 292), (370, 306), color=SOFT, line=1.2)
    page.words(622, 328, "V(x\u2083) is estimated here.\nNo loss, no gradient, no\nstatistic sees this row, and\n"
               "no trace crosses it.", at="left")
    return page


def recurrent() -> Canvas:
    """Draw where the learner's memory begins, and where it is cut."""
    page = Canvas(392)
    step, left = 62, 196
    page.title(16, 22, "The learner begins with the stored state, which older weights have computed")
    for t in range(-1, 9):
        x = left + step * (t + 1) - step / 2
        new = t == 5
        if t >= 0:
            page.box(x - 26, 48, 52, 26, ROLLOUT, f"obs {t}", strength=0.15, size=11, round_=3, line=1)
        for y, color in ((124, POLICY), (236, LEARNER)):
            if color == LEARNER and t < 0:
                continue
            stale = color == LEARNER and t == 0
            page.circle(x, y, 16, POLICY if stale else color, "0" if new else f"h{chr(0x2080 + t)}" if t >= 0 else "",
                        strength=0 if new else 0.6 if stale else 0.25)
            if t < 8 and t + 1 != 5:
                page.arrow((x + 17, y), (x + step - 18, y), color=color, line=1.6)
            if t + 1 == 5:
                page.line((x + step / 2, y - 22), (x + step / 2, y + 22), color=WARN, line=2.4)
    page.arrow((118, 124), (147, 124), color=POLICY, line=1.6, dashed=True)
    x0, x5 = left + step / 2, left + step * 5.5
    page.words(16, 124, "policy worker,\nas it acted", at="left", color=POLICY, bold=True)
    page.words(16, 236, "learner,\nas it trains", at="left", color=LEARNER, bold=True)
    page.words(left + step * 4.5, 164, "weights 7, 7, 8, 8, ...", size=11, color=SOFT)
    page.words(left + step * 4.5, 276, "weights 11", size=11, color=SOFT)
    page.arrow((x0, 142), (x0, 217), color=MEMORY, line=2.4)
    page.words(x0 + 10, 184, "stored: rnn_states[0]", at="left", color=MEMORY)
    page.line((left, 42), (left, 262), color=SOFT, dashed=True)
    page.words(left - 6, 60, "trajectory", at="right", size=11, color=SOFT)
    page.arrow((x0, 304), (x0, 256), color=WARN, line=1.2)
    page.words(x0 - 20, 318, "stale: weights 11 would have", at="left")
    page.words(x0 - 20, 335, "computed another one", at="left")
    page.arrow((x5, 304), (x5, 256), color=WARN, line=1.2)
    page.words(x5 - 20, 318, "an episode begins: the sequence is cut,", at="left")
    page.words(x5 - 20, 335, "the state is zero, no gradient crosses", at="left")
    page.note(374, "All other states are computed anew. With --recurrence R a stored state comes in every R steps.")
    return page


def normalization() -> Canvas:
    """Draw in which units observations and values are, and where they change."""
    page = Canvas(370)
    page.title(16, 22, "Two kinds of units: those of the environment, and the network's")
    page.box(16, 44, 798, 108, ROLLOUT, strength=0.05)
    page.words(28, 62, "true units", at="left", color=ROLLOUT, bold=True)
    page.box(16, 212, 798, 108, LEARNER, strength=0.05)
    page.words(28, 302, "units in which it is easy to learn: mean 0, deviation 1", at="left", color=LEARNER, bold=True)
    boxes = ((40, 82, ROLLOUT, 120, "observations"), (40, 226, LEARNER, 120, "network's\ninput"),
             (216, 226, LEARNER, 100, "network"), (372, 226, LEARNER, 120, "value head's\noutput"),
             (372, 82, ROLLOUT, 120, "values"), (548, 82, ROLLOUT, 100, "V-trace"), (690, 82, ROLLOUT, 108, "targets"),
             (690, 226, LEARNER, 108, "value loss"))
    for x, y, color, width, text in boxes:
        page.box(x, y, width, 44, color, text)
    page.arrow((100, 126), (100, 224))
    page.words(110, 182, f"{MINUS} mean, / deviation", at="left")
    page.arrow((160, 248), (214, 248))
    page.arrow((316, 248), (370, 248))
    page.arrow((432, 226), (432, 128))
    page.words(442, 182, f"{TIMES} deviation, + mean", at="left")
    page.arrow((492, 104), (546, 104))
    page.arrow((648, 104), (688, 104))
    page.arrow((744, 126), (744, 224))
    page.words(734, 182, f"{MINUS} mean, / deviation", at="right")
    page.arrow((598, 56), (598, 80), color=ROLLOUT)
    page.words(612, 62, "rewards", at="left")
    page.arrow((492, 248), (688, 248))
    page.note(346, "Means and deviations are part of the model, are published with it, and move between two datasets.")
    return page


DRAWS, ONCE = "draws from its\ndistribution", "each trajectory,\nonce"
ALGORITHMS = {
    "APPO": (DRAWS, "each trajectory,\nin epochs", f"V-trace\nwith {LAMBDA}", "ratio \u00b7 A,\nclipped", "1"),
    "IMPALA": (DRAWS, ONCE, "V-trace", f"{MINUS}{RHO} log {PI} \u00b7 A", "1"),
    "A3C": (DRAWS, ONCE, "n-step\nreturn", f"{MINUS}log {PI} \u00b7 A", "several,\nno lock"),
    "Ape-X": ("best Q,\nor at random", "replay,\nby priority", "n steps, then\ntarget net's Q",
              f"(y {MINUS} Q)\u00b2", "1"),
    "PQL": ("its action,\nplus noise", "replay", "smaller of two\ntarget Qs", f"(y {MINUS} Q)\u00b2\nand {MINUS}Q",
            "2: for Q and\nthe policy"),
}

def algorithms() -> Canvas:
    """Draw the pipeline that all algorithms share, and what each of them puts into it."""
    page = Canvas(424)
    page.title(16, 22, "One pipeline; an algorithm is what stands in its five places")
    widths = (150, 156, 152, 150, 134)
    heads = (("acts", POLICY), ("learns from", MEMORY), ("targets", LEARNER), ("loss", LEARNER), ("learners", LEARNER))
    x = 90.0
    for column, ((head, color), width) in enumerate(zip(heads, widths, strict=True)):
        page.box(x, 44, width - 18, 36, color, head, strength=0.3, size=14, bold=True)
        if column < 4:
            page.arrow((x + width - 18, 62), (x + width - 1, 62), line=2)
        for row, (name, cells) in enumerate(ALGORITHMS.items()):
            y = 96 + 58 * row
            before = [others[column] for others in ALGORITHMS.values()][:row]
            page.box(x, y, width - 18, 48, color, cells[column], strength=0 if cells[column] in before else 0.12,
                     line=0.8 if cells[column] in before else 1.5, size=11)
            if not column:
                page.words(16, y + 24, name, at="left", bold=True, size=14)
        x += width
    page.note(404, "White: as in a row above. Sampling, memory, weights, recovery and records are the same for all.")
    return page
