"""The drawings: the system, the way of a transition through it, its memory, time, and what is learned."""

from docs.pictures.canvas import INK, LEARNER, MEMORY, POLICY, ROLLOUT, SOFT, WAIT, WARN, Canvas

ARROW, MINUS, GAMMA, DELTA, RHO = "\N{RIGHTWARDS ARROW}", "\N{MINUS SIGN}", "\u03b3", "\u03b4", "\u03c1"
LEFT, RIGHT = 150, 814  # where lanes begin and end


def architecture() -> Canvas:
    """Draw the processes, what they share, and the messages between them."""
    page = Canvas(430)
    page.box(16, 10, 798, 32, MEMORY, "trainer: allocates all memory, starts every process, runs the one loop; its "
             "services record, save, replace", strength=0.06)
    page.box(262, 96, 552, 140, dashed=True)
    page.words(474, 224, "one set for each policy", color=SOFT, at="left", size=11)
    page.titled(16, 108, 178, 92, ROLLOUT, "rollout workers", "step environments;\nhold no network", copies=3)
    page.titled(276, 108, 172, 92, POLICY, "policy workers", "act for all that wait,\nin one batch", copies=2)
    page.titled(510, 108, 100, 92, MEMORY, "weights", "two copies,\nversion")
    page.titled(684, 108, 120, 92, LEARNER, "learner", "batcher thread;\nSGD steps")
    messages = (("asks", 234, 119, [(207, 130), (274, 130)]), ("answers", 234, 188, [(275, 176), (209, 176)]),
                ("these slots are full", 400, 53, [(80, 106), (80, 62), (770, 62), (770, 106)]),
                ("these slots are free again", 400, 75, [(716, 106), (716, 84), (130, 84), (130, 106)]))
    for text, x, y, points in messages:
        page.arrow(*points)
        page.words(x, y, text, size=11)
    page.box(16, 292, 798, 78, MEMORY, strength=0.1)
    page.words(415, 311, "shared memory: slots of one trajectory each, T steps", size=14, bold=True, color=MEMORY)
    page.words(415, 333, f"obs[t]  {ARROW}  actions[t], log_probs[t], values[t], policy_version[t]  {ARROW}  "
               "rewards[t], terminated[t], truncated[t]")
    page.words(415, 354, "and tables that say who has each slot, and which split awaits which answer", color=SOFT)
    data = (("observations,\nrewards, ends", 112, 262, "left", [(100, 292), (100, 214)]),
            ("observations,\nactions", 364, 262, "left", [(352, 292), (352, 208)]),
            ("full slots", 733, 262, "right", [(743, 292), (743, 202)]),
            ("after each\nSGD step", 648, 130, "center", [(684, 154), (612, 154)]),
            ("copy", 483, 138, "center", [(510, 154), (457, 154)]))
    for text, x, y, at, points in data:
        page.arrow(*points, color=MEMORY, line=3, both=at == "left")
        page.words(x, y, text, size=11, at=at)
    page.arrow((150, 402), (190, 402))
    page.words(198, 402, "message: 8 bytes in a pipe, a kind and a number", at="left")
    page.arrow((516, 402), (556, 402), color=MEMORY, line=3)
    page.words(564, 402, "data: in place, never pickled", at="left")
    return page


def journey() -> Canvas:
    """Draw the way of one transition through the system, with the walkthrough's chapters."""
    page = Canvas(470)
    page.box(20, 66, 790, 346, dashed=True)
    page.box(20, 14, 790, 30, MEMORY, "trainer: replaces whatever dies", strength=0.06)
    stations = ((46, 96, ROLLOUT, "environment", "shows obs[t];\nan episode may end here", "3 7"),
                (320, 96, MEMORY, "slot, row t", "obs[t] is written in place;\na message of 8 bytes asks", "2"),
                (594, 96, POLICY, "policy worker", "one batch: action, its\nprobability, memory", "8"),
                (46, 274, MEMORY, "full slot", "T rows, and obs[T]\nfor what comes after", "4"),
                (320, 274, LEARNER, "learner", "targets, loss,\nSGD steps", "5 6 9 11 14"),
                (594, 274, MEMORY, "weights", "version + 1,\ncopied before the next batch", "4"))
    for x, y, color, title, text, chapters in stations:
        page.titled(x, y, 190, 96, color, title, text)
        for place, number in enumerate(chapters.split()):
            page.circle(x + 14 + 26 * place, y, 12, color, number)
    ways = (("obs[t]", 278, 131, ROLLOUT, [(238, 144), (318, 144)]),
            ("asks", 552, 131, ROLLOUT, [(512, 144), (592, 144)]),
            ("actions[t] go into the row; the environment steps: rewards[t], obs[t+1];  T times", 420, 214, POLICY,
             [(689, 192), (689, 226), (166, 226), (166, 194)]),
            ("after T steps", 154, 248, ROLLOUT, [(110, 192), (110, 272)]),
            ("copied", 278, 309, LEARNER, [(238, 322), (318, 322)]),
            ("published", 552, 309, LEARNER, [(512, 322), (592, 322)]), ("", 0, 0, LEARNER, [(740, 272), (740, 194)]))
    for text, x, y, color, points in ways:
        page.arrow(*points, color=color, line=2.4)
        page.words(x, y, text, size=11)
    notes = ((32, 392, SOFT, "1", "all of this goes on at the same time"), (330, 392, SOFT, "13", "and fast"),
             (640, 392, SOFT, "10", "once for each policy"), (40, 29, MEMORY, "12", ""),
             (32, 440, INK, "n", "chapter of the walkthrough"), (300, 440, ROLLOUT, "", "rollout worker"),
             (436, 440, POLICY, "", "policy worker"), (566, 440, LEARNER, "", "learner"),
             (660, 440, MEMORY, "", "shared memory"))
    for x, y, color, number, text in notes:
        page.circle(x, y, 12 if number else 8, color, number)
        page.words(x + 18, y, text, at="left")
    return page


def shared_memory() -> Canvas:
    """Draw a slot, a message, and what a queue would do instead."""
    page = Canvas(490)
    page.title(16, 20, "Here: data stays where it is, and the news of it takes 8 bytes")
    page.box(160, 40, 500, 222, MEMORY, strength=0.05)
    page.words(410, 57, "a slot in shared memory: one trajectory, T steps", color=MEMORY, bold=True)
    page.box(16, 100, 112, 100, ROLLOUT, "rollout\nworker", size=14, bold=True)
    page.box(702, 100, 112, 100, POLICY, "policy\nworker", size=14, bold=True)
    columns = ("obs", "rewards", "ends", "valid", "new\nepisode", "rnn\nstates", "actions", "log\nprobs", "values",
               "policy\nversion")
    for column, name in enumerate(columns):
        color = ROLLOUT if column < 5 else POLICY
        page.words(205 + 47 * column, 88, name, size=11, color=color, bold=True)
        for number, row in enumerate("01t_T"):
            if row != "T" or name in ("obs", "new\nepisode", "rnn\nstates"):
                page.box(184 + 47 * column, 108 + 24 * number, 43, 20, color, strength=0.75 if row == "t" else 0.12)
    for number, row in enumerate(("0", "1", "t", "...", "T")):
        page.words(174, 118 + 24 * number, row, at="right", bold=row == "t")
    page.words(410, 247, "each column has one writer, so nobody needs a lock", size=11, color=SOFT)
    page.arrow((130, 164), (162, 164), color=ROLLOUT, line=3)
    page.arrow((700, 164), (658, 164), color=POLICY, line=3)
    page.arrow((84, 200), (84, 290), (746, 290), (746, 203))
    page.arrow((774, 200), (774, 328), (56, 328), (56, 203))
    for y, note in ((290, "act for split 3"), (328, "split 3 has its actions")):
        page.box(300, y - 13, 110, 26, INK, "kind: SPLIT", strength=0, size=11)
        page.box(410, y - 13, 110, 26, INK, "index: 3", strength=0, size=11)
        page.words(530, y - 11, note, at="left", size=11)
    page.words(104, 279, "2 x 4 bytes in a pipe", at="left", size=11)
    page.line((16, 358), (814, 358))
    page.title(16, 384, "Usually: everything is pickled and goes through the kernel")
    steps = ("trajectory", "pickle", "write", "read", "unpickle", "a copy of it")
    for number, text in enumerate(steps):
        page.box(16 + 138 * number, 408, 108, 36, WARN if 0 < number < 5 else SOFT, text)
        if number:
            page.arrow((138 * number - 12, 426), (14 + 138 * number, 426), color=WARN, line=3)
    page.words(415, 468, "and a queue has a lock, which dies with its holder", color=SOFT)
    return page


def lanes(page: Canvas, y: float, *names: str) -> None:
    """Draw idle lanes, one below the other; work is drawn upon them."""
    for row, name in enumerate(names):
        page.bar(LEFT, y + 30 * row, RIGHT - LEFT, WAIT)
        page.words(LEFT - 10, y + 30 * row + 12, name, at="right")
    page.time(LEFT, RIGHT, y + 30 * len(names) + 6)


def why_asynchronous() -> Canvas:
    """Draw a loop of phases above processes that never wait for a phase."""
    page = Canvas(436)
    page.title(16, 22, "Synchronous: one kind of work at a time, the others wait")
    lanes(page, 44, "environments", "environments", "network acts", "learner")
    for begin in (LEFT, LEFT + 332):
        for step in range(4):
            x = begin + 40 * step
            page.bar(x, 44, 26, ROLLOUT)
            page.bar(x, 74, 18 + 4 * (step % 2), ROLLOUT)  # the faster one waits for the slower one
            page.bar(x + 26, 104, 14, POLICY)
        page.bar(begin + 160, 134, 172, LEARNER, "learns")
    page.line((16, 206), (814, 206))
    page.title(16, 232, "Asynchronous: each kind of work in processes of its own")
    lanes(page, 254, "rollout worker", "rollout worker", "policy worker", "learner")
    for row, (offset, period) in enumerate(((0, 42), (17, 39))):
        for x in range(LEFT + offset, RIGHT - 40, period):
            page.bar(x, 254 + 30 * row, 26, ROLLOUT)
            page.bar(x + 27, 314, 13, POLICY)
    for dataset in range(3):
        page.bar(LEFT + 140 + 174 * dataset, 344, 172, LEARNER, "learns")
    legend = ((ROLLOUT, "steps"), (POLICY, "acts"), (LEARNER, "learns"), (WAIT, "waits"))
    for number, (color, text) in enumerate(legend):
        page.circle(LEFT + 90 * number + 8, 418, 7, color)
        page.words(LEFT + 90 * number + 20, 418, text, at="left")
    return page


def policy_lag() -> Canvas:
    """Draw the versions that acted in a trajectory, and the version that is trained when its turn comes."""
    page = Canvas(366)
    page.title(16, 22, "Policy lag: by how many SGD steps the data is older than the policy that learns from it")
    for y, text in ((62, "learner:\nSGD steps"), (128, "policy worker:\nversion it acts with"),
                    (206, "one trajectory:\nversion of each row"), (288, "lag of each row")):
        page.words(LEFT - 10, y, text, at="right")
    for version in range(5, 16):
        x = LEFT + 60 * (version - 5)
        page.bar(x, 50, 57, LEARNER, f"{version} {ARROW} {version + 1}")
        page.bar(x + 14, 116, min(57, RIGHT - x - 14), POLICY, str(version))
        page.arrow((x, 76), (x + 14, 114), color=SOFT, line=1.2)
    begin, turn = LEFT + 134, LEFT + 360
    for row in range(9):
        page.box(begin + 19.5 * row, 190, 18, 32, POLICY, str(7 + row // 3), strength=0.25, size=11)
        page.box(begin + 19.5 * row, 272, 18, 32, WARN, str(4 - row // 3), strength=0.12, size=11)
    page.arrow((begin + 180, 206), (turn - 4, 206), color=MEMORY, line=2.4)
    page.words(begin + 250, 240, "copied during the last SGD\nstep of the dataset before", size=11, color=MEMORY)
    page.box(turn, 190, 237, 32, LEARNER, "trained on, from version 11 on", strength=0.2)
    page.line((turn, 76), (turn, 190), color=LEARNER, line=1.6, dashed=True)
    page.words(begin + 190, 288, f"= 11 {MINUS} the version that acted", at="left")
    page.arrow((begin + 88, 226), (begin + 88, 268), color=SOFT, line=1.2)
    page.time(LEFT, RIGHT, 332)
    return page


def vtrace() -> Canvas:
    """Draw how five temporal differences make one target: the numbers of the walkthrough's example."""
    page = Canvas(424)
    page.title(16, 22, "V-trace: what each later step adds to the target of the first one, vs\u2080")
    for y, text in ((66, "values"), (124, "ratio \u03c0/\u03bc"), (160, f"cut at 1: {RHO} = c"),
                    (212, f"TD error {DELTA}"), (286, "weight in vs\u2080")):
        page.words(16, y, text, at="left", color=SOFT)
    steps = (("1", "1", "1", "0", 1, "1"), ("2", f"2 {ARROW} 1", "2", "1", 1 / 2, f"{GAMMA} c\u2080 = 1/2"),
             ("1/2", "1/2", "3", "1", 1 / 4, f"{GAMMA}\u00b2 c\u2080c\u2081 = 1/4"),
             ("1", "1", "1", "0", 1 / 16, f"{GAMMA}\u00b3 c\u2080c\u2081c\u2082 = 1/16"),
             ("1/2", "1/2", "0", f"{MINUS}1/2", 1 / 32, f"{GAMMA}\u2074 c\u2080c\u2081c\u2082c\u2083 = 1/32"))
    for t, (ratio, cut, reward, delta, weight, text) in enumerate(steps):
        x, middle = 150 + 124 * t, 212 + 124 * t
        page.arrow((x + 20, 66), (x + 103, 66), color=SOFT)
        page.words(middle - 2, 54, f"r = {reward}")
        page.words(middle, 124, ratio)
        page.box(middle - 27, 148, 54, 24, WARN if ARROW in cut else SOFT, cut, bold=ARROW in cut)
        page.box(middle - 50, 196, 100, 32, LEARNER, f"{DELTA}{chr(0x2080 + t)} = {delta}", bold=True)
        page.line((middle, 229), (middle, 274), color=LEARNER, line=1 + 15 * weight)
        page.words(middle, 286, text)
        page.line((middle, 299), (middle, 334), color=LEARNER, line=1 + 15 * weight)
    for t in range(6):
        page.circle(150 + 124 * t, 66, 19, LEARNER, "2", strength=0.2)
        page.words(150 + 124 * t, 96, f"V(x{chr(0x2080 + t)})", size=11, color=SOFT)
    page.box(150, 334, 620, 34, LEARNER, f"vs\u2080 = V(x\u2080) + 0 + 1/2 + 1/4 + 0 {MINUS} 1/64 = 2 + 0.734", size=14,
             bold=True)
    page.words(460, 396, f"{DELTA} = {RHO} (r + {GAMMA} V(x') {MINUS} V(x)),   here {GAMMA} = 1/2 and \u03bb = 1.   "
               "One small ratio makes everything behind it count less.", color=SOFT)
    return page


def time_limits() -> Canvas:
    """Draw the two ends of an episode, and how the end lies in a trajectory."""
    page = Canvas(470)
    ends = (("Terminated: nothing comes after", 22, "0", f"r\u2082 + {GAMMA} \u00b7 0"),
            ("Truncated: time is up, the game would have gone on", 134, "x\u2083",
             f"r\u2082 + {GAMMA} \u00b7 V(x\u2083)"))
    for title, y, last, target in ends:
        page.title(16, y, title)
        for t, text in enumerate(("x\u2080", "x\u2081", "x\u2082", last)):
            page.circle(60 + 110 * t, y + 46, 17, INK if text == "0" else ROLLOUT, text, strength=0.2)
        for t in range(3):
            page.arrow((79 + 110 * t, y + 46), (148 + 110 * t, y + 46), color=SOFT)
            page.words(112 + 110 * t, y + 35, f"r{chr(0x2080 + t)}")
        page.words(425, y + 46, f"target of x\u2082:  {target}", at="left", size=14, bold=True)
    page.words(425, 204, "x\u2083 is the true final observation, not the first of the next episode", at="left",
               color=SOFT)
    page.line((16, 236), (814, 236))
    page.title(16, 262, "In a trajectory: the environment resets one step later, and that row is masked")
    rows = (("obs[t]", "x\u2081", "x\u2082", "x\u2083", "y\u2080", "y\u2081"),
            ("actions[t]", "a\u2081", "a\u2082", "ignored", "b\u2080", "b\u2081"),
            ("rewards[t]", "r\u2081", "r\u2082", "", "q\u2080", "q\u2081"), ("truncated[t]", "", "True", "", "", ""),
            ("valid[t]", "True", "True", "False", "True", "True"), ("new_episode[t]", "", "", "", "True", ""))
    for row, (name, *cells) in enumerate(rows):
        page.words(130, 319 + 25 * row, name, at="right")
        for column, cell in enumerate(cells):
            masked = row > 0 and column == 2
            page.box(142 + 92 * column, 308 + 25 * row, 88, 22, SOFT if masked else ROLLOUT, cell,
                     strength=0.25 if masked else 0.12, bold=cell == "False")
    page.arrow((616, 292), (370, 292), (370, 306), color=SOFT, line=1.2)
    page.words(622, 322, "V(x\u2083) is estimated here.\nNo loss, no gradient, no\nstatistic sees this row, and\n"
               "no trace crosses it.", at="left")
    return page


DRAWINGS = (architecture, journey, why_asynchronous, shared_memory, policy_lag, vtrace, time_limits)
