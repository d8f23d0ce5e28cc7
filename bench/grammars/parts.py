"""Hand-written parts of schemas: objects that function calls and extraction forms of public APIs ask for."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(longest: int, about: str = "", shortest: int = 1) -> Schema:
    return {"type": "string", "minLength": shortest, "maxLength": longest} | ({"description": about} if about else {})


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high} | more


def amount(low: int, high: int, step: float = 0.25) -> Schema:
    """Return a number. A step bounds its digits."""
    return {"type": "number", "minimum": low, "maximum": high, "multipleOf": step}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": f"^{regex}$"}


def of_format(name: str, longest: int = 0) -> Schema:
    return {"type": "string", "format": name} | ({"maxLength": longest} if longest else {})


def listed(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


YES_NO: Schema = {"type": "boolean"}
DAY, UUID, IPV4 = of_format("date"), of_format("uuid"), of_format("ipv4")
MOMENT, EMAIL, URI = of_format("date-time", 25), of_format("email", 24), of_format("uri", 30)
CURRENCY = one_of("EUR", "USD", "GBP", "JPY", "CHF")
COUNTRY = pattern("[A-Z]{2}")
LANGUAGE = one_of("en", "de", "fr", "es", "zh", "日本語")
UNIT = one_of("celsius", "fahrenheit")

# Each object: what it is, and its fields, the most important ones first.
OBJECTS: dict[str, tuple[str, dict[str, Schema]]] = {
    "get_weather": (
        "Return the current weather of a place.",
        {"location": text(24, "City and country"), "unit": UNIT, "days": whole(1, 14)},
    ),
    "create_event": (
        "Add an event to the calendar.",
        {"title": text(24), "start": MOMENT, "minutes": whole(5, 480, multipleOf=5), "attendees": listed(EMAIL, 2)},
    ),
    "send_email": (
        "Send a message.",
        {"to": EMAIL, "subject": text(30), "priority": one_of("low", "normal", "high"), "body": text(60)},
    ),
    "search_flights": (
        "Find flights between two airports.",
        {
            "origin": pattern("[A-Z]{3}"),
            "destination": pattern("[A-Z]{3}"),
            "departure": DAY,
            "cabin": one_of("economy", "premium", "business", "first"),
            "passengers": whole(1, 9),
        },
    ),
    "book_hotel": (
        "Reserve a room.",
        {"hotel_id": UUID, "check_in": DAY, "nights": whole(1, 30), "breakfast": YES_NO},
    ),
    "transfer_money": (
        "Move money between two accounts.",
        {"iban": pattern("DE[0-9]{20}"), "amount": amount(0, 10_000, 0.25), "currency": CURRENCY},
    ),
    "search_documents": (
        "Search in a collection.",
        {"query": text(40), "top_k": whole(1, 50), "language": LANGUAGE, "since": DAY},
    ),
    "run_query": (
        "Read rows of a table.",
        {
            "table": pattern("[a-z_]{1,16}"),
            "columns": listed(pattern("[a-z_]{1,12}"), 3, 1),
            "limit": whole(1, 1000),
        },
    ),
    "set_thermostat": (
        "Set the temperature of a room.",
        {"room": one_of("kitchen", "bedroom", "bath", "office"), "target": amount(5, 30, 0.5), "unit": UNIT},
    ),
    "create_ticket": (
        "Open a ticket of support.",
        {"summary": text(40), "severity": whole(1, 5), "labels": listed(text(10), 3), "is_public": YES_NO},
    ),
    "person": (
        "A person who is mentioned in the text.",
        {"name": text(24), "age": whole(0, 120), "email": EMAIL, "nationality": COUNTRY},
    ),
    "address": (
        "A postal address.",
        {"street": text(24), "city": text(20), "postcode": pattern("[0-9]{5}"), "country": COUNTRY},
    ),
    "invoice": (
        "An invoice.",
        {"number": pattern("INV-[0-9]{6}"), "issued": DAY, "total": amount(0, 99_999), "currency": CURRENCY},
    ),
    "line_item": (
        "A line of an order.",
        {"sku": pattern("[A-Z0-9]{8}"), "quantity": whole(1, 99), "unit_price": amount(0, 9_999)},
    ),
    "product": (
        "A product of a shop.",
        {"name": text(24), "price": amount(0, 9_999), "in_stock": YES_NO, "tags": listed(text(8), 3)},
    ),
    "review": (
        "A review of a product.",
        {"rating": whole(1, 5), "sentiment": one_of("positive", "neutral", "negative"), "quote": text(50)},
    ),
    "classification": (
        "The topic of a message.",
        {
            "label": one_of("billing", "bug", "feature request", "account", "other"),
            "confidence": amount(0, 1, 0.125),
            "is_urgent": YES_NO,
        },
    ),
    "citation": (
        "A source of a statement.",
        {"title": text(36), "year": whole(1900, 2030), "url": URI, "page": whole(1, 2000)},
    ),
    "measurement": (
        "A value that was measured.",
        {"quantity": text(16), "value": amount(-1000, 1000), "unit": one_of("m", "kg", "s", "°C"), "at": MOMENT},
    ),
    "server": (
        "A machine in a data centre.",
        {"host": of_format("hostname", 20), "address": IPV4, "cores": whole(1, 256), "state": one_of("up", "down")},
    ),
    "recipe_step": (
        "A step of a recipe.",
        {"order": whole(1, 20), "instruction": text(60), "minutes": whole(0, 240)},
    ),
    "medication": (
        "A medicine that a patient takes.",
        {"drug": text(20), "dose_mg": amount(0, 2000, 0.5), "times_a_day": whole(1, 6), "with_food": YES_NO},
    ),
    "move": (
        "A move in a game of chess.",
        {"piece": one_of("K", "Q", "R", "B", "N", "P"), "from": pattern("[a-h][1-8]"), "to": pattern("[a-h][1-8]")},
    ),
    "answer": (
        "An answer with a short reasoning.",
        {"reasoning": text(80), "answer": one_of("A", "B", "C", "D")},
    ),
    "user_profile": (
        "The profile of a user.",
        {"id": UUID, "handle": pattern("[a-z][a-z0-9_]{2,14}"), "language": LANGUAGE, "joined": DAY},
    ),
}
