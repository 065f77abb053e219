"""Drawings of the whole system: its parts, the way of a transition through them, its memory, and what swaps or dies."""

from docs.pictures.canvas import Canvas
from docs.pictures.style import INK, LEARNER, MEMORY, POLICY, ROLLOUT, SOFT, WARN


def architecture() -> Canvas:
    """Draw the processes, what they share, and the messages between them."""
    page = Canvas(430)
    page.box(16, 10, 798, 32, MEMORY, strength=0.06)
    page.words(415, 26, "supervisor: allocates all memory, starts every process, records, saves, replaces what dies",
               color=MEMORY)
    page.box(262, 96, 552, 140, SOFT, strength=0, dashed=True, line=1.2, round_=10)
    page.words(474, 224, "one set for each policy", color=SOFT, at="left", size=11)
    page.titled(16, 108, 178, 92, ROLLOUT, "rollout workers", "step environments;\nhold no network", copies=3)
    page.titled(276, 108, 172, 92, POLICY, "policy workers", "act for all that wait,\nin one batch", copies=2)
    page.titled(510, 108, 100, 92, MEMORY, "weights", "two copies,\nversion")
    page.titled(684, 108, 120, 92, LEARNER, "learner", "batcher thread;\nSGD steps")
    messages(page)
    page.box(16, 292, 798, 78, MEMORY, strength=0.1)
    page.words(415, 311, "shared memory: slots of one trajectory each, T steps", size=14, bold=True, color=MEMORY)
    page.words(415, 333, "obs[t]  \N{RIGHTWARDS ARROW}  actions[t], log_probs[t], values[t], policy_version[t]  "
               "\N{RIGHTWARDS ARROW}  rewards[t], terminated[t], truncated[t]", size=12)
    page.note(354, "and tables that say who has each slot, and which split awaits which answer")
    for x in (100, 352):
        page.arrow((x, 292), (x, 214 if x == 100 else 208), color=MEMORY, line=3, both=True)
    page.words(112, 262, "observations,\nrewards, ends", at="left", size=11)
    page.words(364, 262, "observations,\nactions", at="left", size=11)
    page.arrow((743, 292), (743, 202), color=MEMORY, line=3)
    page.words(733, 262, "full slots", at="right", size=11)
    page.arrow((684, 154), (612, 154), color=MEMORY, line=3)
    page.words(648, 130, "after each\nSGD step", size=11)
    page.arrow((510, 154), (457, 154), color=MEMORY, line=3)
    page.words(483, 138, "copy", size=11)
    page.arrow((150, 402), (190, 402))
    page.words(198, 402, "message: 8 bytes in a pipe, a kind and a number", at="left")
    page.arrow((516, 402), (556, 402), color=MEMORY, line=3)
    page.words(564, 402, "data: in place, never pickled", at="left")
    return page


def messages(page: Canvas) -> None:
    """Draw the four messages that training consists of."""
    page.arrow((207, 130), (274, 130))
    page.words(234, 119, "asks", size=11)
    page.arrow((275, 176), (209, 176))
    page.words(234, 188, "answers", size=11)
    page.arrow((80, 106), (80, 62), (770, 62), (770, 106))
    page.words(400, 52, "these slots are full", size=11)
    page.arrow((716, 106), (716, 84), (130, 84), (130, 106))
    page.words(400, 74, "these slots are free again", size=11)


def station(page: Canvas, x: float, y: float, color: str, title: str, text: str, chapters: str) -> None:
    """Draw one station of a transition's journey, with the numbers of the chapters about it."""
    page.box(x, y, 190, 96, color)
    page.words(x + 95, y + 28, title, size=14, bold=True, color=color)
    page.words(x + 95, y + 64, text)
    for place, number in enumerate(chapters.split()):
        page.circle(x + 14 + 26 * place, y, 12, color, number)


def journey() -> Canvas:
    """Draw the way of one transition through the system, with the walkthrough's chapters."""
    page = Canvas(470)
    page.box(20, 66, 790, 346, SOFT, strength=0, dashed=True, line=1.2, round_=12)
    page.words(798, 392, "once for each policy", at="right", size=11, color=SOFT)
    page.circle(664, 392, 12, SOFT, "10")
    page.box(20, 14, 790, 30, MEMORY, strength=0.06)
    page.words(415, 29, "supervisor: replaces whatever dies", color=MEMORY)
    page.circle(40, 29, 12, MEMORY, "12")
    station(page, 46, 96, ROLLOUT, "environment", "shows obs[t];\nan episode may end here", "3 7")
    station(page, 320, 96, MEMORY, "slot, row t", "obs[t] is written in place;\na message of 8 bytes asks", "2")
    station(page, 594, 96, POLICY, "policy worker", "one batch: action, its\nprobability, memory", "8")
    station(page, 46, 274, MEMORY, "full slot", "T rows, and obs[T]\nfor what comes after", "4")
    station(page, 320, 274, LEARNER, "learner", "targets, loss,\nSGD steps", "5 6 9 11 14")
    station(page, 594, 274, MEMORY, "weights", "version + 1,\ncopied before the next batch", "4")
    page.arrow((238, 144), (318, 144), color=ROLLOUT, line=2.4)
    page.words(278, 131, "obs[t]", size=11)
    page.arrow((512, 144), (592, 144), color=ROLLOUT, line=2.4)
    page.words(552, 131, "asks", size=11)
    page.arrow((689, 192), (689, 226), (166, 226), (166, 194), color=POLICY, line=2.4, corner=12)
    page.words(420, 214, "actions[t] go into the row; the environment steps: rewards[t], obs[t+1];  T times", size=11)
    page.arrow((110, 192), (110, 272), color=ROLLOUT, line=2.4)
    page.words(118, 248, "after T steps", size=11, at="left")
    page.arrow((238, 322), (318, 322), color=LEARNER, line=2.4)
    page.words(278, 309, "copied", size=11)
    page.arrow((512, 322), (592, 322), color=LEARNER, line=2.4)
    page.words(552, 309, "published", size=11)
    page.arrow((740, 272), (740, 194), color=LEARNER, line=2.4)
    page.words(36, 392, "all of this goes on at the same time", at="left", size=11, color=SOFT)
    page.circle(252, 392, 12, SOFT, "1")
    page.words(288, 392, "and fast", at="left", size=11, color=SOFT)
    page.circle(354, 392, 12, SOFT, "13")
    page.circle(40, 440, 12, INK, "n")
    page.words(60, 440, "chapter of the walkthrough", at="left")
    for x, color, text in ((300, ROLLOUT, "rollout worker"), (436, POLICY, "policy worker"), (566, LEARNER, "learner"),
                           (660, MEMORY, "shared memory")):
        page.box(x, 433, 14, 14, color, strength=1, round_=3)
        page.words(x + 20, 440, text, at="left")
    return page


ROWS = ("0", "1", "t", "...", "T")
BY_WORKER = ("obs", "rewards", "ends", "valid", "new\nepisode")
BY_POLICY = ("rnn\nstates", "actions", "log\nprobs", "values", "policy\nversion")


def slot_table(page: Canvas, left: float, top: float) -> None:
    """Draw a slot as a table: a row for each step, a column for each tensor."""
    for column, name in enumerate((*BY_WORKER, *BY_POLICY)):
        color = ROLLOUT if name in BY_WORKER else POLICY
        x = left + 47 * column
        page.words(x + 23, top - 18, name, size=11, color=color, bold=True, spacing=1.1)
        for number, row in enumerate(ROWS):
            if row == "T" and name not in ("obs", "new\nepisode", "rnn\nstates"):
                continue
            page.box(x + 2, top + 24 * number + 2, 43, 20, color, strength=0.75 if row == "t" else 0.12, line=0.8,
                     round_=3)
    for number, row in enumerate(ROWS):
        page.words(left - 8, top + 24 * number + 12, row, at="right", bold=row == "t")


def shared_memory() -> Canvas:
    """Draw a slot, a message, and what a queue would do instead."""
    page = Canvas(490)
    page.title(16, 20, "Here: data stays where it is, and the news of it takes 8 bytes")
    page.box(160, 40, 500, 222, MEMORY, strength=0.05)
    page.words(410, 57, "a slot in shared memory: one trajectory, T steps", color=MEMORY, bold=True)
    for x, color, text in ((16, ROLLOUT, "rollout\nworker"), (702, POLICY, "policy\nworker")):
        page.box(x, 100, 112, 100, color)
        page.words(x + 56, 150, text, size=14, bold=True, color=color)
    slot_table(page, 182, 106)
    page.words(410, 247, "each column has one writer, so nobody needs a lock", size=11, color=SOFT)
    page.arrow((130, 164), (162, 164), color=ROLLOUT, line=3)
    page.arrow((700, 164), (658, 164), color=POLICY, line=3)
    page.arrow((84, 200), (84, 290), (746, 290), (746, 203))
    page.arrow((774, 200), (774, 328), (56, 328), (56, 203))
    for y, note in ((290, "act for split 3"), (328, "split 3 has its actions")):
        page.box(300, y - 13, 110, 26, INK, "kind: SPLIT", strength=0, size=11, round_=3, zorder=4)
        page.box(410, y - 13, 110, 26, INK, "index: 3", strength=0, size=11, round_=3, zorder=4)
        page.words(530, y - 11, note, at="left", size=11)
    page.words(104, 279, "2 x 4 bytes in a pipe", at="left", size=11)
    page.line((16, 358), (814, 358))
    page.title(16, 384, "Usually: everything is pickled and goes through the kernel")
    steps = (("trajectory", SOFT), ("pickle", WARN), ("write", WARN), ("read", WARN), ("unpickle", WARN),
             ("a copy of it", SOFT))
    for number, (text, color) in enumerate(steps):
        x = 16 + 138 * number
        page.box(x, 408, 108, 36, color, text)
        if number:
            page.arrow((x - 28, 426), (x - 2, 426), color=WARN, line=3)
    page.note(468, "and a queue has a lock, which dies with its holder")
    return page


def death() -> Canvas:
    """Draw what is lost when a process dies, and what makes up for it."""
    page = Canvas(438)
    columns = (
        (ROLLOUT, "a rollout worker dies", "its environments and the\ntrajectories it has begun",
         "it alone, with other seeds", "all others; what it has handed in\nis learned from"),
        (LEARNER, "anything else dies", "what all had under way; of the optimizer\nwhat the newest checkpoint lacks",
         "all processes, with empty inboxes", "the weights that were published last,\nall counters and settings"))
    for row, (text, y) in enumerate((("lost", 120), ("begins again", 206), ("lives on", 292))):
        page.words(16, y, text, at="left", bold=True, color=(WARN, INK, MEMORY)[row])
    for column, (color, title, *cells) in enumerate(columns):
        x = 130 + 346 * column
        page.box(x, 20, 330, 44, color)
        page.words(x + 150, 42, title, size=14, bold=True)
        page.cross(x + 305, 42, 6, WARN)
        for row, (cell, y) in enumerate(zip(cells, (120, 206, 292), strict=True)):
            page.box(x, y - 31, 330, 62, (WARN, color, MEMORY)[row], cell, strength=0.1)
            page.arrow((x + 165, y - 55 + 2 * (row == 0)), (x + 165, y - 33), color=SOFT, line=1.2)
    page.box(16, 350, 798, 72, MEMORY, strength=0.08)
    page.words(415, 370, "why this works", bold=True, color=MEMORY)
    page.words(415, 398, "All data lies in shared memory, which no process takes along; a lock ends with its holder.\n"
               "A request names the worker that asks: no answer to a dead one reaches its successor.")
    return page
