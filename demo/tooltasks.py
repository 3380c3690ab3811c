"""Tool calls: definitions, questions that need them, and answers to their results."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from demo.schema import Exchange, Message, Tool, assistant, user
from demo.words import CITIES, ITEMS, NAMES, WORDS

Values = dict[str, object]


@dataclass(frozen=True)
class Param:
    """A parameter; one of `names` is drawn per tool, so that the model must read the schema."""

    slot: str
    names: tuple[str, ...]
    kind: str
    about: str


@dataclass(frozen=True)
class Family:
    """A kind of tool: names, parameters, questions with {slots}, and how it answers."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[Param, ...]
    questions: tuple[str, ...]
    values: Callable[[random.Random], Values]
    # result -> (JSON object returned by the tool, assistant's sentence)
    result: Callable[[random.Random, Values], tuple[Values, str]]


def _city(rng: random.Random) -> Values:
    return {"city": rng.choice(CITIES)}


def _weather(rng: random.Random, values: Values) -> tuple[Values, str]:
    degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
    out: Values = {"temperature": degrees, rng.choice(("condition", "conditions")): sky}
    return out, f"It is {sky} in {values['city']}, at {degrees} degrees."


def _clock(rng: random.Random, values: Values) -> tuple[Values, str]:
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": now}, f"It is {now} in {values['city']}."


def _pair(rng: random.Random) -> Values:
    return {"a": rng.randint(1, 999), "b": rng.randint(1, 999)}


def _sum(rng: random.Random, values: Values) -> tuple[Values, str]:
    total = int(str(values["a"])) + int(str(values["b"]))
    return {"result": total}, f"The result is {total}."


def _product(rng: random.Random, values: Values) -> tuple[Values, str]:
    total = int(str(values["a"])) * int(str(values["b"]))
    return {"result": total}, f"The result is {total}."


def _stock(rng: random.Random, values: Values) -> tuple[Values, str]:
    price = rng.randint(5, 900)
    return {"price": price}, f"{values['symbol']} is at {price} dollars."


def _alarm(rng: random.Random, values: Values) -> tuple[Values, str]:
    return {"status": "ok"}, f"Your alarm is set for {values['time']}."


def _mail(rng: random.Random, values: Values) -> tuple[Values, str]:
    return {"status": "sent"}, f"Your message to {values['to']} is sent."


def _order(rng: random.Random, values: Values) -> tuple[Values, str]:
    state = rng.choice(("shipped", "delivered", "pending", "lost", "cancelled"))
    return {"status": state}, f"Order {values['order']} is {state}."


def _search(rng: random.Random, values: Values) -> tuple[Values, str]:
    count = rng.randint(1, 99)
    return {"results": count}, f"I found {count} results for {values['query']}."


def random_word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """A lowercase string: letters at random, or syllables that read like a word."""
    length = rng.randint(low, high)
    if rng.random() < 0.6:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(length))
    pairs = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(length))
    return "".join(pairs)[:length]


VERBS = (
    "get", "find", "open", "close", "read", "load", "save", "delete", "update", "check", "run",
    "play",
)  # fmt: skip
SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "clear")
_CITY = Param("city", ("city", "city", "location", "place"), "string", "Name of the city")

FAMILIES: tuple[Family, ...] = (
    Family(
        ("get_weather", "get_weather", "get_current_weather", "weather"),
        ("Get the weather", "Get the current weather in a city", "Current weather of a place"),
        (_CITY,),
        (
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "What's the weather like in {city}?",
            "Weather in {city}",
            "Is it raining in {city}?",
            "How warm is it in {city}?",
            "Tell me the weather in {city}.",
            "What is the weather like in {city} today?",
            "Is it cold in {city}?",
        ),
        _city,
        _weather,
    ),
    Family(
        ("get_time", "get_current_time", "clock"),
        ("Get the time", "Get the current time in a city", "Local time of a place"),
        (_CITY,),
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Time in {city}",
            "Tell me the time in {city}.",
            "How late is it in {city}?",
        ),
        _city,
        _clock,
    ),
    Family(
        ("add", "add_numbers", "sum"),
        ("Add two numbers", "Adds two integers"),
        (
            Param("a", ("a", "x", "first"), "integer", "First number"),
            Param("b", ("b", "y", "second"), "integer", "Second number"),
        ),
        (
            "Use the tool to add {a} and {b}.",
            "Add {a} and {b} with the tool.",
            "Use the tool: {a} + {b}",
            "Please add {a} and {b} using the tool.",
        ),
        _pair,
        _sum,
    ),
    Family(
        ("multiply", "multiply_numbers", "product"),
        ("Multiply two numbers", "Multiplies two integers"),
        (
            Param("a", ("a", "x", "first"), "integer", "First number"),
            Param("b", ("b", "y", "second"), "integer", "Second number"),
        ),
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}", "Compute {a} * {b}.", "Multiply {a} and {b}."),
        _pair,
        _product,
    ),
    Family(
        ("get_stock_price", "stock_price", "get_quote"),
        ("Get the price of a stock", "Current price of a share"),
        (Param("symbol", ("symbol", "ticker"), "string", "Symbol of the stock"),),
        (
            "What is the price of {symbol}?",
            "How much is {symbol} stock?",
            "Stock price of {symbol}",
            "What is {symbol} trading at?",
        ),
        lambda rng: {"symbol": random_word(rng, 2, 4).upper()},
        _stock,
    ),
    Family(
        ("set_alarm", "create_alarm"),
        ("Set an alarm", "Sets an alarm at a time"),
        (Param("time", ("time", "at"), "string", "Time of the alarm, HH:MM"),),
        ("Set an alarm for {time}.", "Wake me at {time}.", "Please wake me up at {time}.", "Alarm at {time}"),
        lambda rng: {"time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"},
        _alarm,
    ),
    Family(
        ("send_message", "send_email", "send_mail"),
        ("Send a message", "Sends a message to a person"),
        (
            Param("to", ("to", "recipient", "name"), "string", "Who receives it"),
            Param("text", ("text", "body", "message"), "string", "Text of the message"),
        ),
        (
            "Send {to} the message '{text}'.",
            "Tell {to}: {text}",
            "Write to {to}: {text}",
            "Send a message to {to} saying '{text}'.",
        ),
        lambda rng: {"to": rng.choice(NAMES), "text": " ".join(rng.choices(WORDS, k=2))},
        _mail,
    ),
    Family(
        ("get_order", "lookup_order", "order_status", "track_order"),
        ("Look up an order", "Status of an order"),
        (Param("order", ("order_id", "id", "order"), "string", "Number of the order"),),
        (
            "Where is order {order}?",
            "What is the status of order {order}?",
            "Look up order {order}.",
            "Track my order {order}.",
        ),
        lambda rng: {"order": rng.choice("ABCXYZ") + str(rng.randint(10, 9999))},
        _order,
    ),
    Family(
        ("search", "web_search", "search_web"),
        ("Search the web", "Searches for a text"),
        (Param("query", ("query", "q", "text"), "string", "What to search for"),),
        (
            "Search for {query}.",
            "Search the web for {query}.",
            "Find {query} on the web.",
            "Look for {query} on the internet.",
        ),
        lambda rng: {"query": " ".join(rng.choices(WORDS + ITEMS, k=rng.randint(1, 3)))},
        _search,
    ),
)


def _done(rng: random.Random, values: Values) -> tuple[Values, str]:
    result = random_word(rng)
    return {"result": result}, f"The result is {result}."


def _invented(rng: random.Random) -> Family:
    """A tool with a name never seen before, so that names get copied and not only known."""
    verb = rng.choice(VERBS)
    noun = rng.choice((rng.choice(WORDS), random_word(rng)))
    name, field = f"{verb}_{noun}", rng.choice((f"{noun}_id", "name", "value", "key", "title"))
    return Family(
        (name,),
        (f"{verb.capitalize()} a {noun}", f"{verb.capitalize()} the {noun}"),
        (Param("value", (field,), "string", f"The {field}"),),
        (
            f"Use {name} with {field} {{value}}.",
            f"Call {name} for {{value}}.",
            f"{verb.capitalize()} the {noun} {{value}}.",
            f"Please {verb} {noun} {{value}}.",
        ),
        lambda rng: {"value": random_word(rng) + rng.choice(("", str(rng.randint(1, 99))))},
        _done,
    )


def _define(rng: random.Random, family: Family) -> tuple[Tool, dict[str, str]]:
    """One concrete definition, and which parameter name stands for which slot."""
    names = {param.slot: rng.choice(param.names) for param in family.params}
    described = rng.random() < 0.6
    properties = {
        names[param.slot]: {"type": param.kind, "description": param.about} if described else {"type": param.kind}
        for param in family.params
    }
    parameters: Values = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = list(names.values())
    function: Values = {"name": rng.choice(family.names)}
    if rng.random() < 0.9:
        function["description"] = rng.choice(family.about) + rng.choice(("", "."))
    function["parameters"] = parameters
    return {"type": "function", "function": function}, names


def _draw(rng: random.Random) -> list[Family]:
    """One to three different families, the first being the one that gets called."""
    pool = [_invented(rng) if rng.random() < 0.3 else f for f in rng.sample(FAMILIES, 3)]
    return pool[: rng.choice((1, 1, 2, 2, 3))]


def _call(name: str, arguments: Values) -> Message:
    # The OpenAI form carries the arguments as a JSON string; the chat template takes both.
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def make_tools(rng: random.Random) -> tuple[Tool, ...]:
    """Definitions only, for conversations in which none is needed."""
    return tuple(_define(rng, family)[0] for family in _draw(rng))


def tool_exchange(rng: random.Random, answered: bool) -> Exchange:
    """A question and the call; with `answered`, also the tool's result and the answer."""
    families = _draw(rng)
    defined = [_define(rng, family) for family in families]
    family, (tool, names) = families[0], defined[0]
    values = family.values(rng)
    question = rng.choice(family.questions).format(**values)
    arguments = {names[slot]: value for slot, value in values.items()}
    turns = [user(question), _call(tool["function"]["name"], arguments)]
    key = f"tool:{question}"
    if answered:
        result, answer = family.result(rng, values)
        content = json.dumps(result, ensure_ascii=False)
        turns += [{"role": "tool", "tool_call_id": "call_0", "content": content}]
        turns += [assistant(answer)]
        key += content
    tools = [definition for definition, _ in defined]
    rng.shuffle(tools)
    return Exchange("tool_answer" if answered else "tool_call", key, tuple(turns), tuple(tools))
