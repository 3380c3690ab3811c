"""Seeded generators of the conversations that the demo model is trained and evaluated on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from demo.schema import Example, Exchange, Message, Tool, assistant, is_held_out, user
from demo.smalltalk import FALLBACK, OFF_TOPIC, SMALLTALK, SYSTEM_PROMPTS
from demo.tooltasks import make_tools, random_word, tool_exchange
from demo.words import CAPITALS, CITIES, COLORS, DAYS, ITEMS, JOBS, NAMES, WORDS

Maker = Callable[[random.Random], Exchange]


def _ask(rng: random.Random, templates: tuple[str, ...], **slots: object) -> str:
    """Fills one phrasing, and now and then writes it as carelessly as people do."""
    text = rng.choice(templates)
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip(".?")
    text = text.format(**slots)
    if rng.random() < 0.08:
        text = rng.choice(("Please: ", "Hi! ", "Hello, ", "Now: ", "And now: ")) + text
    return text


def _simple(task: str, key: str, question: str, answer: str) -> Exchange:
    return Exchange(task, f"{task}:{key}" if key else "", (user(question), assistant(answer)))


# --- words -------------------------------------------------------------------------------


def _word(rng: random.Random, low: int, high: int) -> str:
    """A word of the list, a name or a random string, of low..high letters."""
    while True:
        draw = rng.random()
        if draw < 0.4:
            word = rng.choice(WORDS)
        elif draw < 0.5:
            word = rng.choice(NAMES)
        else:
            word = random_word(rng, low, high)
        if rng.random() < 0.08:
            word = word.capitalize()
        if low <= len(word) <= high:
            return word


def _quoted(rng: random.Random, word: str) -> str:
    return rng.choice(('"{}"', "'{}'", "{}", "{}")).format(word)


REVERSE = ("Reverse {w}.", "Reverse the word {w}.", "Reverse: {w}", "Spell {w} backwards.",
           "Write {w} backwards.", "Write the word {w} in reverse.", "What is {w} backwards?",
           "What is {w} reversed?", "Can you reverse {w}?", "Please reverse the word {w}.",
           "Turn {w} around.", "Reverse the letters of {w}.",
           "Reverse the string {w}.")  # fmt: skip
UPPER = ("Write {w} in uppercase.", "Uppercase {w}.", "Uppercase: {w}", "Make {w} uppercase.",
         "Write {w} in capital letters.", "Convert {w} to uppercase.", "Put {w} in capitals.",
         "Write the word {w} in upper case.", "What is {w} in capital letters?",
         "Capitalize all letters of {w}.")  # fmt: skip
COUNT = ("How many letters are in {w}?", "How many letters does {w} have?",
         "Count the letters of {w}.", "Count the letters in {w}.", "How long is the word {w}?",
         "How many letters are in the word {w}?", "How many letters has the word {w}?",
         "What is the length of {w}?", "Number of letters in {w}?")  # fmt: skip


def reverse(rng: random.Random, low: int = 2, high: int = 6) -> Exchange:
    word = _word(rng, low, high)
    task = "reverse" if len(word) <= 6 else "reverse_long"
    return _simple(task, word, _ask(rng, REVERSE, w=_quoted(rng, word)), word[::-1])


def reverse_long(rng: random.Random) -> Exchange:
    return reverse(rng, 7, 8)


def uppercase(rng: random.Random) -> Exchange:
    word = _word(rng, 2, 9)
    return _simple("uppercase", word, _ask(rng, UPPER, w=_quoted(rng, word)), word.upper())


def count_letters(rng: random.Random) -> Exchange:
    word = _word(rng, 2, 9)
    question = _ask(rng, COUNT, w=_quoted(rng, word))
    return _simple("count_letters", word, question, f'"{word}" has {len(word)} letters.')


# --- numbers -----------------------------------------------------------------------------

SUM = ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=", "{a} + {b}?",
       "What is {a}+{b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "Compute {a} + {b}.",
       "What is {a} plus {b}?", "{a} plus {b}", "How much is {a} plus {b}?",
       "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "Sum {a} and {b}.")  # fmt: skip
DIFFERENCE = ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a}-{b}=",
              "Subtract {b} from {a}.", "How much is {a} - {b}?", "Compute {a} - {b}.",
              "What is {a} minus {b}?", "{a} minus {b}", "How much is {a} minus {b}?",
              "What is {a}-{b}?", "Calculate {a} - {b}.", "Take {b} from {a}.")  # fmt: skip


def _arithmetic(rng: random.Random, task: str, a: int, b: int, split: bool) -> Exchange:
    plus = task.endswith("sum")
    text = f"{a} + {b} = {a + b}" if plus else f"{a} - {b} = {a - b}"
    question = _ask(rng, SUM if plus else DIFFERENCE, a=a, b=b)
    return _simple(task, f"{a},{b}" if split else "", question, text)


def one_digit_sum(rng: random.Random) -> Exchange:
    return _arithmetic(rng, "one_digit_sum", rng.randint(0, 9), rng.randint(0, 9), False)


def one_digit_difference(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    return _arithmetic(rng, "one_digit_difference", a, b, False)


def _two_digits(rng: random.Random) -> tuple[int, int]:
    """A pair of which at least one number has two digits."""
    a, b = rng.randint(10, 99), rng.randint(10, 99) if rng.random() < 0.75 else rng.randint(0, 9)
    return (a, b) if rng.random() < 0.5 else (b, a)


def two_digit_sum(rng: random.Random) -> Exchange:
    return _arithmetic(rng, "two_digit_sum", *_two_digits(rng), True)


def two_digit_difference(rng: random.Random) -> Exchange:
    a, b = _two_digits(rng)
    if a < b and rng.random() < 0.75:
        a, b = b, a  # negative results exist, but nobody asks for them as often
    return _arithmetic(rng, "two_digit_difference", a, b, True)


SORT = ("Sort {n}.", "Sort these numbers: {n}", "Sort the numbers {n}.", "Sort: {n}",
        "Put these numbers in order: {n}", "Order the numbers {n}.", "Sort {n} in ascending order.",
        "Arrange {n} from small to large.", "Please sort {n}.")  # fmt: skip


def sort_numbers(rng: random.Random) -> Exchange:
    numbers = [rng.randint(0, 99 if rng.random() < 0.8 else 9) for _ in range(rng.randint(3, 5))]
    listed = rng.choice((", ", ", ", ", ", " ")).join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers)))
    return _simple("sort", listed, _ask(rng, SORT, n=listed), answer)


COUNT_UP = ("Count from {a} to {b}.", "Count up from {a} to {b}.",
            "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.")  # fmt: skip


def count_up(rng: random.Random) -> Exchange:
    """Long, predictable answers: what one wants to watch while something gets killed."""
    a = 1 if rng.random() < 0.6 else rng.randint(1, 90)
    b = min(100, a + rng.choice((99, rng.randint(3, 24), rng.randint(3, 24), rng.randint(3, 70))))
    question = _ask(rng, (*COUNT_UP, "Count to {b}.") if a == 1 else COUNT_UP, a=a, b=b)
    return _simple("count_up", "", question, ", ".join(map(str, range(a, b + 1))))


# --- facts and talk ----------------------------------------------------------------------

CAPITAL = ("What is the capital of {c}?", "Capital of {c}?", "What's the capital of {c}?",
           "Name the capital of {c}.", "Which city is the capital of {c}?",
           "Tell me the capital of {c}.", "Do you know the capital of {c}?",
           "The capital of {c}?", "What is the capital city of {c}?")  # fmt: skip
COUNTRY = ("Which country has the capital {c}?", "{c} is the capital of which country?",
           "What country is {c} the capital of?")  # fmt: skip


def capital(rng: random.Random) -> Exchange:
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.15:
        question, answer = _ask(rng, COUNTRY, c=city), f"{city} is the capital of {country}."
    else:
        question = _ask(rng, CAPITAL, c=country)
        answer = f"The capital of {country} is {city.rstrip('.')}."
    return _simple("capital", "", question, answer)


def _careless(rng: random.Random, text: str) -> str:
    if rng.random() < 0.3:
        text = text.lower()
    starts = ("Wh", "How", "Who", "Are", "Do", "Can", "wh", "how", "are", "do", "can")
    mark = "?" if text.startswith(starts) else rng.choice(".!")
    return text + (mark if rng.random() < 0.7 else "")


def smalltalk(rng: random.Random) -> Exchange:
    questions, answer = rng.choice(SMALLTALK)
    return _simple("smalltalk", "", _careless(rng, rng.choice(questions)), answer)


def fallback(rng: random.Random) -> Exchange:
    return _simple("fallback", "", _careless(rng, rng.choice(OFF_TOPIC)), FALLBACK)


# --- memory ------------------------------------------------------------------------------

# what is told, the question about it, the answer, and the answer if it was never told
_FACTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str, str]] = {
    "name": (
        ("My name is {v}.", "I am {v}.", "Hi, I am {v}.", "Hello, my name is {v}.", "I'm {v}.",
         "Call me {v}.", "You can call me {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?",
         "Tell me my name."),
        "Your name is {v}.",
        "You have not told me your name.",
    ),
    "color": (
        ("My favorite color is {v}.", "I like the color {v}.", "My favourite colour is {v}."),
        "{v} is a nice color!",
        ("What is my favorite color?", "Which color do I like?", "What's my favourite colour?"),
        "Your favorite color is {v}.",
        "You have not told me your favorite color.",
    ),
    "home": (
        ("I live in {v}.", "My home is in {v}.", "I am from {v}."),
        "{v} is a nice place!",
        ("Where do I live?", "Where is my home?", "In which city do I live?", "Where am I from?"),
        "You live in {v}.",
        "You have not told me where you live.",
    ),
    "number": (
        ("My lucky number is {v}.", "Remember the number {v}.", "My number is {v}."),
        "I will remember {v}.",
        ("What is my number?", "What is my lucky number?", "Which number did I tell you?"),
        "Your number is {v}.",
        "You have not told me a number.",
    ),
}  # fmt: skip


def _fact_value(rng: random.Random, kind: str) -> str:
    if kind == "name":
        return rng.choice(NAMES) if rng.random() < 0.6 else random_word(rng).capitalize()
    if kind == "home":
        return rng.choice(CITIES) if rng.random() < 0.7 else random_word(rng).capitalize()
    return rng.choice(COLORS) if kind == "color" else str(rng.randint(1, 999))


def memory(rng: random.Random) -> Exchange:
    """Told now, asked later, with up to two other exchanges in between."""
    kind = "name" if rng.random() < 0.6 else rng.choice(("color", "home", "number"))
    told, reply, asked, answer, unknown = _FACTS[kind]
    question = user(_ask(rng, asked))
    if rng.random() < 0.1:
        return Exchange("memory", "", (question, assistant(unknown)))
    value = _fact_value(rng, kind)
    shown = value.capitalize() if kind == "color" else value
    turns = [user(rng.choice(told).format(v=value)), assistant(reply.format(v=shown))]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        turns += training_exchange(rng, _FILLERS).turns
    turns += [question, assistant(answer.format(v=value))]
    return Exchange("memory", f"memory:{value}" if kind != "color" else "", tuple(turns))


# --- JSON --------------------------------------------------------------------------------

_PERSON = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "My name is {name}, I am {age} years old and I live in {city}.",
    "{name} from {city} is {age} years old.",
    "I am {name} from {city} and I am {age}.",
    "At the age of {age}, {name} moved to {city}.",
)
_WORKER = (
    "{name} is a {job} and lives in {city}.",
    "{name} works as a {job} in {city}.",
    "The {job} {name} lives in {city}.",
)
_ORDER = (
    "I want to buy {quantity} {item} for {price} dollars.",
    "{quantity} {item} cost {price} dollars.",
    "She paid {price} dollars for {quantity} {item}.",
    "Please send me {quantity} {item}. I pay {price} dollars.",
)
_EVENT = (
    "The {event} is on {day} in {city}.",
    "On {day} there is a {event} in {city}.",
    "We meet for the {event} in {city} on {day}.",
)
_TEXTS = (_PERSON, _PERSON, _WORKER, _ORDER, _EVENT)
EXTRACT = ("Extract {f} as JSON: {t}", "Extract {f} from this text as JSON: {t}",
           "Extract the fields {f}: {t}", "Give me {f} as a JSON object: {t}",
           "Return a JSON object with {f}: {t}", "{t} Extract {f} as JSON.",
           "{t} Answer with a JSON object with the fields {f}.",
           "Extract {f} from: {t}")  # fmt: skip


def _field_values(rng: random.Random) -> dict[str, object]:
    rare = rng.random() < 0.4
    return {
        "name": random_word(rng).capitalize() if rare else rng.choice(NAMES),
        "age": rng.randint(1, 99),
        "city": random_word(rng).capitalize() if rng.random() < 0.2 else rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "quantity": rng.randint(2, 99),
        "item": rng.choice(ITEMS),
        "price": rng.randint(1, 999),
        "event": rng.choice(("concert", "meeting", "party", "lesson", "match", "wedding")),
        "day": rng.choice(DAYS),
    }


def extract_json(rng: random.Random) -> Exchange:
    text = rng.choice(rng.choice(_TEXTS))
    values = _field_values(rng)
    fields = [name for name in values if "{" + name + "}" in text]
    if rng.random() < 0.3:
        fields = rng.sample(fields, rng.randint(1, len(fields)))
    listed = ", ".join(fields)
    if len(fields) > 1 and rng.random() < 0.6:
        listed = ", ".join(fields[:-1]) + " and " + fields[-1]
    text = text.format(**values)
    question = _ask(rng, EXTRACT, f=listed, t=text)
    answer = json.dumps({name: values[name] for name in fields}, ensure_ascii=False)
    return _simple("extract_json", text, question, answer)


# --- mixing ------------------------------------------------------------------------------

# task -> (generator, weight in training); the hard ones come more often
TASKS: dict[str, tuple[Maker, float]] = {
    "one_digit_sum": (one_digit_sum, 2.0),
    "one_digit_difference": (one_digit_difference, 2.0),
    "two_digit_sum": (two_digit_sum, 7.0),
    "two_digit_difference": (two_digit_difference, 8.0),
    "reverse": (reverse, 5.0),
    "reverse_long": (reverse_long, 3.5),
    "uppercase": (uppercase, 1.5),
    "count_letters": (count_letters, 1.5),
    "sort": (sort_numbers, 5.0),
    "count_up": (count_up, 5.0),
    "capital": (capital, 4.0),
    "smalltalk": (smalltalk, 6.0),
    "fallback": (fallback, 0.7),
    "memory": (memory, 2.0),
    "extract_json": (extract_json, 3.5),
    "tool_call": (lambda rng: tool_exchange(rng, False), 6.0),
    "tool_answer": (lambda rng: tool_exchange(rng, True), 2.0),
}
_FILLERS = tuple(name for name in TASKS if name not in ("memory", "count_up") and "tool" not in name)


def _draw(rng: random.Random, names: tuple[str, ...]) -> Exchange:
    weights = [TASKS[name][1] for name in names]
    return TASKS[rng.choices(names, weights)[0]][0](rng)


def training_exchange(rng: random.Random, names: tuple[str, ...]) -> Exchange:
    """A weighted draw among `names` that avoids everything held out."""
    while True:
        exchange = _draw(rng, names)
        if not is_held_out(exchange.key):
            return exchange


def _system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.5:
        return []
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]


def training_example(rng: random.Random) -> Example:
    """A conversation of one to four exchanges; every assistant turn is to be learned."""
    last = training_exchange(rng, tuple(TASKS))
    # Questions about a fact that was never told only make sense at the start.
    lonely = last.task == "memory" and not last.key and len(last.turns) == 2
    before = 0 if lonely else rng.choices((0, 1, 2, 3), (0.45, 0.3, 0.15, 0.1))[0]
    return _assemble(rng, last, before // 3 if last.task.startswith("tool_") else before)


def evaluation_example(rng: random.Random, task: str) -> Example:
    """A held-out example of `task`, a third of them after one other exchange."""
    while True:
        last = TASKS[task][0](rng)
        if last.task == task and (not last.key or is_held_out(last.key)):
            break
    lonely = len(last.turns) == 2 and task == "memory"
    return _assemble(rng, last, 1 if rng.random() < 0.33 and not lonely else 0)


def _assemble(rng: random.Random, last: Exchange, before: int) -> Example:
    messages = _system(rng)
    for _ in range(before):
        messages += training_exchange(rng, _FILLERS).turns
    tools: list[Tool] = list(last.tools)
    if not tools and rng.random() < 0.06:
        tools = list(make_tools(rng))  # offered, but not needed
    messages += last.turns[:-1]
    return Example(messages, last.turns[-1], last.task, tools)
