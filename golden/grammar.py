"""Templates for long contexts. `{name}` is another rule; `{d4}` a number of four digits; `{x7}` seven hex digits."""

_FIRST = ("Marrow", "Gannet", "Thistle", "Copper", "Hollow", "Lantern", "Osprey", "Saltern", "Wicker", "Fennel")
_SECOND = ("Point", "Reach", "Quay", "Sound", "Bar", "Head")
PLACES = tuple(f"{first} {second}" for first in _FIRST for second in _SECOND)

GRAMMAR: dict[str, tuple[str, ...]] = {
    # Words
    "place": PLACES,
    "person": (
        "Ada Lindqvist", "Tomas Okafor", "Mirela Stan", "Jun Hayashi", "Pilar Quiroga", "Owen Hartley", "Noor Rahman",
        "Sofia Bergman", "Ibrahim Sesay", "Elena Petrova", "Kofi Boateng", "Ruth Abernathy", "Lars Nygaard", "Wei Tan",
    ),
    "thing": (
        "the tide gauge", "the fog horn", "the north lamp", "the radio mast", "the spare winch", "the diesel pump",
        "the weather buoy", "the slipway gate", "the depth sounder", "the signal rocket store", "the ice meter",
        "the mooring chain", "the rain collector", "the battery shed", "the cable drum", "the water tank",
    ),
    "state": (
        "out of order", "working again", "wet inside", "two degrees off", "painted", "locked", "missing a bolt",
        "covered in ice", "replaced by an older model", "as good as new", "louder than before", "slow to start",
    ),
    "when": (
        "before sunrise", "at low water", "on the second day", "after the storm", "late in {month}", "on {d1} {month}",
        "during the night watch", "in the week of the fair", "as the ferry left", "at {hour}:{minute}", "at slack tide",
    ),
    "month": ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    "hour": ("04", "05", "07", "09", "11", "13", "16", "18", "20", "22", "23"),
    "minute": ("00", "05", "12", "17", "20", "26", "31", "38", "44", "49", "53", "58"),
    "ship": (
        "the ferry Aurelia", "a grain ship", "the pilot boat", "two trawlers", "a survey vessel", "the mail packet",
        "a barge with timber", "the cutter Vesper", "a yacht without lights", "the dredger", "an empty tanker",
    ),
    "weather": (
        "fog from the west", "hard frost", "a swell of {d1} metres", "rain until noon", "gusts of {d2} knots",
        "no wind", "hail", "a clear night", "a heavy sea", "drifting ice", "haze over the bar", "thunder far out",
    ),
    "good": ("rope", "paraffin", "copper wire", "flour", "lamp glass", "tar", "paper", "coal", "sailcloth"),
    # Prose
    "prose": (
        "{person} wrote that {thing} at {place} was {state} {when}.",
        "There was {weather} {when}, and {ship} waited off {place}.",
        "Nobody at {place} could say who had moved {thing}.",
        "{person} and {person} argued about {thing} until {ship} came in.",
        "The crew of {place} asked for {d2} metres of {good}, and got {d2}.",
        "With {weather} {when}, {person} stayed at {place} to look after {thing}.",
        "{ship_cap} passed {place} {when} and reported {weather}.",
        "At {place} they keep {thing} and {thing} under one roof.",
        "It took {person} {d2} minutes to reach {place}, since {thing} was {state}.",
        "A letter for {person} lay at {place} for {d2} days.",
        "Between {place} and {place} the channel is {d2} metres wide and marked on one side only.",
        "\"If {thing} is {state}, then leave it,\" said {person} {when}.",
        "The office paid {d3} crowns for {good} and forgot {thing}.",
        "{person} counted {d2} lamps at {place}, one more than the list shows.",
        "Why {ship} had turned back {when} was never found out.",
    ),
    "ship_cap": ("The ferry Aurelia", "A grain ship", "The pilot boat", "The mail packet", "The dredger", "A lugger"),
    # Papers of other shapes
    "log": (
        "20{d2}-0{d1}-1{d1} {hour}:{minute}:{d2} gauge[{d4}] INFO  level={d3}mm drift=-0.{d3} site=\"{place}\"",
        "20{d2}-0{d1}-2{d1} {hour}:{minute}:{d2} lamp[{d4}] WARN  current {d2}.{d1}A above limit, retry in {d2}s",
        "20{d2}-0{d1}-0{d1} {hour}:{minute}:{d2} radio[{d4}] ERROR no answer from 10.{d2}.{d2}.{d1} after {d3}ms",
        "20{d2}-0{d1}-1{d1} {hour}:{minute}:{d2} pump[{d4}] INFO  cycle {d5} done, {d3} litres, {d1} leaks",
        "20{d2}-0{d1}-0{d1} {hour}:{minute}:{d2} store[{d4}] DEBUG wrote {d6} bytes to block {x8} in {d2}us",
    ),
    "row": (
        "| {place} | {good} | {d3} | {d2}.{d2} | {person} |",
        "| {place} | {month} | {d4} | {d1}.{d2} | {state} |",
    ),
    "code_block": (
        "def level_{d3}(readings, limit={d2}):\n    total = 0\n    for i, r in enumerate(readings):\n"
        "        if r.millimetres > limit * {d2}:\n            total += r.millimetres - {d3}\n"
        "    return total / max(len(readings), {d1})",
        "struct Lamp{d3} {\n    uint32_t id = 0x{x8};\n    float watts = {d2}.{d1}f;\n    bool lit() const "
        "{ return watts > {d1}.5f && (id & 0x{x2}) != 0; }\n};",
        "SELECT station, SUM(litres) AS used\nFROM deliveries_{d2}\nWHERE good = '{good}' AND day > {d4}\n"
        "GROUP BY station HAVING SUM(litres) > {d3};",
        "{\"station\": \"{place}\", \"level\": {d3}, \"lamps\": [{d1}, {d2}, {d2}], \"open\": false}",
    ),
    "letter": (
        "Dear {person},\nthank you for the {good}. {prose}\n{prose} Write to me at {place}.\nYours, {person}",
        "To the office: {prose}\nWe need {d2} metres of {good} more.\n{person}, {place}",
    ),
    "code": ("{d4}-{bird}-{d2}",),
    "bird": ("KESTREL", "PLOVER", "HERON", "DUNLIN", "PETREL", "CURLEW", "AVOCET", "SISKIN", "FULMAR", "WHIMBREL"),
    # A coding transcript
    "artifact": ("{bird}-{x7}.tar",),
    "agent_head": (
        "user: The nightly job of the {module} service fails since Tuesday. Please find out why and mend it. "
        "Do not touch the wire format.",
        "user: After the upgrade the {module} tests are red on one machine out of four. Find the cause, then fix it.",
    ),
    "module": ("ledger", "tides", "mooring", "billing", "router", "archive", "beacon", "manifest", "quota", "session"),
    "verb": ("parse", "merge", "flush", "route", "verify", "load", "encode", "rotate", "split", "commit", "trim"),
    "noun": ("frame", "entry", "page", "token", "batch", "window", "header", "bucket", "lease", "cursor", "offset"),
    "file": ("src/{module}/{verb}_{noun}.py", "src/{module}/{noun}.rs", "tests/test_{module}.py", "lib/{noun}.cc"),
    "error": (
        "ValueError: {noun} {d3} outside 0..{d3}", "KeyError: '{noun}_{d2}'", "TimeoutError: no {noun} in {d3} ms",
        "AssertionError: {d3} != {d3}", "TypeError: {verb}() missing argument '{noun}'", "IndexError: {noun} {d2}",
    ),
    "wish": (
        "Keep the change small, please.", "Can you also run it with seed {d4}?", "Why does {file} matter here?",
        "That machine has {d2} cores, by the way.", "The {noun} limit used to be {d3}; nobody knows why it changed.",
    ),
    "thought": (
        "The failure is in `{verb}_{noun}`. I will read {file} before I change anything.",
        "Two tests disagree about the {noun}. I run them alone, in the other order.",
        "The log says {error}. That cannot come from {file}, so I search for other callers.",
        "The {noun} is off by {d1}. My guess is that `{verb}` runs twice after a retry.",
        "That was not it: the number of {noun}s is right, but they arrive late. Next I look at the {module} queue.",
        "With the patch the {noun} test passes; {d1} others still fail. I check whether they failed before.",
    ),
    "tests_command": ("pytest -q tests/test_{module}_{noun}.py -k {verb} --seed {d4}", "cargo test {module}::{noun}"),
    "tests": (
        "tests/test_{module}_{noun}.py::test_{verb}_{noun}[{d3}] PASSED  [ {d2}%]",
        "tests/test_{module}_{noun}.py::test_{verb}_empty_{noun} FAILED  [ {d2}%]",
        "tests/test_{module}_{noun}.py::test_{verb}_twice[{x4}] PASSED  [ {d2}%]",
    ),
    "tests_end": ("E   {error}\n{d1} failed, {d2} passed in {d2}.{d2}s", "{d3} passed in {d1}.{d2}s"),
    "diff_command": ("git diff HEAD~{d1} -- {file}", "git show {x7} -- {file}"),
    "diff": (
        "-    {noun} = {verb}({noun}, limit={d3})", "+    {noun} = {verb}({noun}, limit={d3}, strict=True)",
        "     for {noun} in {verb}_{noun}s(self.{noun}s):", "@@ -{d3},{d1} +{d3},{d2} @@ def {verb}_{noun}(self):",
        "+        if {noun}.size > {d4}:  # {verb} once", "-        return self._{noun}[{d1}:{d2}]",
    ),
    "diff_end": (" {file} | {d2} ++++---",),
    "listing_command": ("sed -n {d2},{d3}p {file}", "cat {file}"),
    "listing": (
        "    def {verb}_{noun}(self, {noun}, *, retries={d1}):", "        self.{noun}s.append({verb}({noun}))",
        "        {noun} = self._{verb}[{noun}.key] or {noun}.{verb}({d2})", "    # a {noun} has {d2} bytes at most",
        "        while not {noun}.done and {noun}.tries < {d2}:", "            raise {error}",
    ),
    "listing_end": ("        return {noun}",),
    "trace_command": ("python -m {module}.{verb} --{noun} {d3}", "./run {module} --trace {x6}"),
    "trace": (
        "Traceback (most recent call last):\n  File \"{file}\", line {d3}, in {verb}_{noun}\n"
        "    {noun} = {verb}({noun})\n  File \"{file}\", line {d2}, in {verb}\n"
        "    return self.{noun}.{verb}(offset={d4})",
        "thread '{module}-{d2}' stopped at {file}:{d3}:{d2}\n   {d1}: {module}::{noun}::{verb}\n"
        "             at {file}:{d3}\n   1{d1}: {module}::{verb}_{noun}\n             at {file}:{d4}",
    ),
    "trace_end": ("{error}",),
    "build_log_command": ("make -j{d1} {module}", "cmake --build build-{x4} --target {module}_{noun}"),
    "build_log": (
        "[ {d2}%] Building CXX object {module}/CMakeFiles/{noun}.dir/{verb}.cc.o",
        "lib/{noun}.cc:{d3}:{d2}: warning: unused variable '{noun}' [-Wunused-variable]",
        "[ {d2}%] Linking CXX shared library lib{module}_{noun}.so",
    ),
    "build_log_end": ("make: *** [{module}] Error {d1}", "[100%] Built target {module}_{noun}"),
    "search_command": ("grep -rn {verb}_{noun} src tests", "git log --oneline -n {d2} -- {file}"),
    "search": (
        "{file}:{d3}:    {noun} = {verb}_{noun}({noun}, {d2})", "{x7} {module}: {verb} the {noun} before the {noun}",
        "{file}:{d2}:from {module} import {verb}_{noun}",
    ),
    "search_end": ("({d2} lines)",),
}  # fmt: skip
