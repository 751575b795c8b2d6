"""The texts of the benchmark, written for it: four domains, copying work, prose, and texts for fidelity.

They are part of the measurement: change one and earlier results are no longer comparable.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAINS = ("code", "maths", "translation", "chat")
COPYING = ("summarise", "edit", "answer")
PROSE = ("prose",)
PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `name` is unique, `kind` is its domain or the sort of work."""

    name: str
    kind: str
    text: str

    @property
    def group(self) -> str:
        """ "domain", "copying", "prose" or "prefill": what ratios are split by."""
        if self.kind in DOMAINS:
            return "domain"
        if self.kind in COPYING:
            return "copying"
        return self.kind


GARDEN = (
    "The community garden behind the old railway station began with eleven raised beds and a borrowed hose. In the "
    "first spring the soil was so thin that the volunteers had to bring in forty barrows of compost from the council "
    "depot, and most of the beans they planted before the last frost were lost in a single night. The second year "
    "went better. A retired bus driver called Ilse Brandt drew up a rota so that somebody watered the beds every "
    "evening, the school next door built a shed out of pallets, and a baker on Mill Street agreed to take all the "
    "spare herbs in exchange for bread on Saturdays. By the third year there were thirty-four beds, a waiting list of "
    "sixty families, and a small orchard of apple and plum trees along the southern wall. The garden now has three "
    "rules that are painted on the gate. Tools go back to the shed before dark. Nobody picks from a bed that is not "
    "theirs. Anyone who cannot water their bed for a week must ask a neighbour to do it. The council has twice "
    "offered to turn the site into a car park and has twice changed its mind after several hundred letters arrived at "
    "the town hall."
)

GLACIER = (
    "Glaciers move because ice under its own weight behaves a little like very stiff honey. Near the surface the ice "
    "is brittle and cracks into crevasses, but below about fifty metres the pressure is high enough for its crystals "
    "to slide past one another, and the whole body creeps downhill. Where the base of the glacier is at the melting "
    "point, a thin film of water lets it slip over the rock as well. Slip is often faster than creep, and it changes "
    "with the seasons: in early summer meltwater pours down shafts called moulins, lifts the ice slightly, and speeds "
    "it up. Later in the summer the water has carved wide tunnels, the pressure falls, and the glacier slows down "
    "again. Researchers measure this motion with poles drilled into the ice, with satellite radar, and with small "
    "microphones that listen for the faint quakes made when the base sticks and suddenly lets go. A valley glacier in "
    "the Alps typically moves between thirty and two hundred metres a year, while the fastest outlet glaciers of "
    "Greenland move more than ten kilometres in the same time."
)

LIBRARY = (
    "The travelling library of Nordholm visits nine villages every second week. It leaves the harbour at half past "
    "seven on Tuesday, stops for one hour in each of the first five villages, and spends the night at the farm of the "
    "Aakre family. On Wednesday it visits the other four villages and is back at the harbour by five in the "
    "afternoon. The bus carries 2,300 books, two computers, and a box of board games that children may borrow for a "
    "fortnight. Its driver, Tor Lindqvist, has worked on the route for nineteen years and also delivers medicines for "
    "the pharmacy, because four of the villages have no shop. The library costs the county 410,000 crowns a year. "
    "When the county proposed to replace it with a parcel service in 2019, the villages collected 1,760 signatures, "
    "and the plan was dropped. Since then the number of loans has risen by a fifth, mostly because of audiobooks."
)

BRIDGE = (
    "The footbridge at Karlshaven was closed on 3 March after an inspector found cracks in two of its twelve steel "
    "hangers. The cracks were small, each about four centimetres long, but both were in the same corner of the "
    "bridge, where salt water collects in winter. Engineers replaced all twelve hangers, although only two were "
    "damaged, because the others came from the same batch of steel. The work took seven weeks and cost 86,000 euros, "
    "which was 19,000 euros less than planned. During the closure a ferry carried walkers across the inlet every "
    "twenty minutes. The bridge opened again on 21 April, and the town will now inspect it every six months instead "
    "of every two years."
)

INVENTORY_CODE = '''def total_value(items, currency="EUR"):
    """Sum up the value of all items that are in stock."""
    total = 0
    for item in items:
        if item["quantity"] <= 0:
            continue
        if item["currency"] != currency:
            raise ValueError("unexpected currency: " + item["currency"])
        total = total + item["price"] * item["quantity"]
    return total


def cheapest(items):
    """Return the cheapest item that is in stock, or None."""
    best = None
    for item in items:
        if item["quantity"] <= 0:
            continue
        if best is None or item["price"] < best["price"]:
            best = item
    return best
'''

LOG_CODE = """import re

LINE = re.compile(r"^(\\d{4}-\\d{2}-\\d{2}) (INFO|WARN|ERROR) (.*)$")


class LogReader:
    def __init__(self, path):
        self.path = path
        self.skipped = 0

    def entries(self):
        with open(self.path) as handle:
            for line in handle:
                match = LINE.match(line)
                if match is None:
                    self.skipped += 1
                    continue
                date, level, message = match.groups()
                yield {"date": date, "level": level, "message": message}

    def errors(self):
        return [entry for entry in self.entries() if entry["level"] == "ERROR"]
"""

PROMPTS = (
    Prompt(
        "code 1", "code", "Write a Python function that merges two sorted lists into one sorted list. Add an example."
    ),
    Prompt(
        "maths 1",
        "maths",
        "A baker sells rolls in bags of 6 for 4 euros. A school needs 90 rolls and pays with a 100 euro note. How "
        "much change does it get? Explain each step.",
    ),
    Prompt(
        "translation 1",
        "translation",
        "Translate to English: Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung, weil ein Baum auf den "
        "Gleisen lag. Die Fahrgäste warten in der Halle und trinken Kaffee.",
    ),
    Prompt(
        "chat 1",
        "chat",
        "I have a free weekend and it will rain on both days. What could I do at home with two children?",
    ),
    Prompt(
        "code 2", "code", "Explain what a hash table is and show a small implementation in Python with put and get."
    ),
    Prompt(
        "maths 2",
        "maths",
        "The sides of a rectangle are 7 cm and 12 cm. Find its area, its perimeter and the length of its diagonal, "
        "and show how you got each result.",
    ),
    Prompt(
        "translation 2",
        "translation",
        "Translate to French: My sister has moved into a small flat near the river. Every morning she walks along the "
        "water before she takes the bus to her office.",
    ),
    Prompt(
        "chat 2",
        "chat",
        "My neighbour plays loud music late at night. How can I talk to her about it and stay friendly?",
    ),
    Prompt("summarise 1", "summarise", f"Summarise this passage and keep its own words where you can.\n\n{GARDEN}"),
    Prompt(
        "edit 1", "edit", f"Rename the variable item to product in this code and return all of it.\n\n{INVENTORY_CODE}"
    ),
    Prompt(
        "answer 1",
        "answer",
        f"{LIBRARY}\n\nQuote the sentences that say what the bus carries and why the plan was dropped.",
    ),
    Prompt("summarise 2", "summarise", f"Repeat the most important sentences of this text, in order.\n\n{GLACIER}"),
    Prompt("edit 2", "edit", f"Add a docstring to every method of this class and return the whole file.\n\n{LOG_CODE}"),
    Prompt(
        "answer 2",
        "answer",
        f"{BRIDGE}\n\nWhy was the bridge closed, and what did the repair cost? Answer with quotes.",
    ),
    Prompt(
        "prose 1",
        "prose",
        "Write a story about a lighthouse keeper who finds a letter in a bottle on a winter morning.",
    ),
    Prompt("prose 2", "prose", "Describe a market in a harbour town at dawn: its sounds, its smells and its people."),
    Prompt("prose 3", "prose", "Write an essay about what makes a good teacher and why patience matters."),
)

# Joined and cut to the wanted number of tokens, this is the long prompt whose prefill is timed.
LONG_TEXT = "\n\n".join((GARDEN, GLACIER, LIBRARY, BRIDGE, INVENTORY_CODE, LOG_CODE))

WARM_UP = "Name three colours."

FIDELITY_TEXTS = (
    GARDEN,
    GLACIER,
    LIBRARY,
    BRIDGE,
    INVENTORY_CODE,
    LOG_CODE,
    "To find how many tiles cover the floor, first work out the area. The room is 4.2 metres long and 3 metres wide, "
    "so its area is 4.2 x 3 = 12.6 square metres. One tile is 30 centimetres by 30 centimetres, which is 0.3 x 0.3 = "
    "0.09 square metres. Dividing gives 12.6 / 0.09 = 140 tiles. Because some tiles break when they are cut, it is "
    "wise to add ten percent: 140 x 1.1 = 154 tiles. If the tiles come in boxes of twelve, 154 / 12 = 12.83, so "
    "thirteen boxes are needed, and 13 x 12 - 154 = 2 tiles are left over as spares. At 18 euros a box the floor "
    "costs 234 euros. If x is the price of a box and n the number of boxes, the cost is C = n x; for a budget of 200 "
    "euros we need n <= 11.",
    "Question: What does the word 'tide' mean, and why are there two of them a day?\nAnswer: A tide is the slow rise "
    "and fall of the sea. The moon pulls on the water that is nearest to it a little more than on the centre of the "
    "Earth, and on the centre a little more than on the water at the far side. This stretches the ocean into two "
    "bulges, one below the moon and one opposite. As the Earth turns, most coasts pass through both bulges in a "
    "little under twenty-five hours.\nQuestion: Do lakes have tides?\nAnswer: Yes, but they are tiny; even in a large "
    "lake they are only a few centimetres high and are hidden by wind and by changes of air pressure.",
    "Guten Morgen, Frau Weber. Können Sie mir bitte sagen, wann der nächste Bus zum Bahnhof fährt? Good morning, Mrs "
    "Weber. Could you please tell me when the next bus to the station leaves? Il part dans dix minutes, mais il est "
    "souvent en retard le lundi. It leaves in ten minutes, but it is often late on Mondays. Entonces prefiero ir a "
    "pie, porque hace buen tiempo y la estación no está lejos. Then I prefer to walk, because the weather is fine and "
    "the station is not far away.",
    "She had not been back to the house since the summer of the flood. The gate still leaned on its one good hinge, "
    "the pump in the yard was red with rust, and somebody, years ago, had nailed a horseshoe above the kitchen door "
    "with the open end down, so that, as her grandmother used to say, all the luck ran out of it. She put her bag on "
    "the step and listened. Wind in the poplars. A dog, far off. And then, from inside the house where nobody had "
    "lived for eleven years, the small clear sound of a cup being set down on a saucer. She did not run. She was too "
    "tired to run, and besides, whoever drinks tea from a saucered cup is seldom dangerous. She knocked on the door "
    "of her own house and waited, politely, for somebody to say that she could come in.",
)


def select(*, quick: bool = False) -> list[Prompt]:
    """The prompts of a run: all of them, or with `quick` the first of each kind."""
    if not quick:
        return list(PROMPTS)
    first: dict[str, Prompt] = {}
    for prompt in PROMPTS:
        first.setdefault(prompt.kind, prompt)
    return list(first.values())
