"""Word lists that the task generators draw from."""
# ruff: noqa: SIM905  (a block of words reads better than a list of quoted ones)

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """
    cat dog sun sky sea map car bus key cup pen box hat bed egg ice jam leg arm toe red blue
    green black white pink gold fox owl bee ant cow pig hen rat bat bird fish frog bear wolf
    lion tiger horse sheep goat duck mouse snake whale shark eagle zebra panda koala camel
    apple banana cherry grape lemon mango melon olive orange peach pear plum tomato potato
    carrot onion garlic pepper bread butter cheese honey sugar salt rice pasta pizza soup
    salad cookie cake coffee tea milk water juice wine river lake ocean island beach desert
    forest mountain valley hill field garden flower tree leaf root seed grass stone rock sand
    rain snow wind storm cloud thunder winter summer spring autumn morning evening night day
    week month year clock watch time hour minute second house home door window wall floor roof
    kitchen table chair lamp sofa mirror carpet pillow blanket bottle glass plate spoon fork
    knife basket bucket hammer nail screw ladder rope paper pencil book letter story poem song
    music piano guitar violin drum flute dance film photo picture color paint brush museum
    school teacher student class lesson number math science history city town street road
    bridge tower castle church market shop bank hotel airport station train plane boat ship
    bicycle truck rocket planet moon star comet galaxy space robot computer keyboard screen
    server client network internet packet router socket thread process kernel memory cache
    buffer stack queue stream token model python rust linux code debug compile program
    function variable string array vector matrix table index value object method module
    package library version release branch commit merge test build deploy cloud cluster node
    gateway engine worker pagoda hello world happy sad angry brave calm clever funny gentle
    kind lazy lucky quiet quick slow strong weak young old tall short big small great little
    friend family mother father sister brother baby child doctor nurse lawyer farmer baker
    driver pilot sailor soldier king queen prince wizard dragon giant fairy ghost monster
    treasure jungle pirate ninja puzzle riddle secret magic energy power light shadow dream
    smile laugh voice sound noise silver copper iron steel metal wood cotton silk leather
    jacket shirt dress shoe boot glove scarf button pocket zipper purple yellow brown violet
    walk run jump swim fly sing read write draw cook eat drink sleep think learn teach play
    work help give take open close start stop begin end push pull throw catch build break
    level radar noon civic kayak racecar banjo jazz quartz zigzag oxygen rhythm sphinx wizard
    """.split()
)

CAPITALS: dict[str, str] = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Canada": "Ottawa",
    "Australia": "Canberra",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "Chile": "Santiago",
    "Peru": "Lima",
    "Colombia": "Bogota",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Nigeria": "Abuja",
    "Ethiopia": "Addis Ababa",
    "Morocco": "Rabat",
    "Tunisia": "Tunis",
    "Algeria": "Algiers",
    "Senegal": "Dakar",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Russia": "Moscow",
    "Ukraine": "Kyiv",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Serbia": "Belgrade",
    "Croatia": "Zagreb",
    "Slovenia": "Ljubljana",
    "Slovakia": "Bratislava",
    "Czechia": "Prague",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Denmark": "Copenhagen",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Iceland": "Reykjavik",
    "Ireland": "Dublin",
    "the United Kingdom": "London",
    "the United States": "Washington, D.C.",
    "Estonia": "Tallinn",
    "Latvia": "Riga",
    "Lithuania": "Vilnius",
    "South Korea": "Seoul",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Indonesia": "Jakarta",
    "the Philippines": "Manila",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Lebanon": "Beirut",
    "Jordan": "Amman",
    "Saudi Arabia": "Riyadh",
    "Qatar": "Doha",
    "New Zealand": "Wellington",
}

NAMES: tuple[str, ...] = tuple(
    """
    Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Maria Nina Oscar Paul Quinn
    Rosa Sam Tom Uma Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eva Frank Gina Henry
    Irene John Karl Lena Max Nora Olga Peter Rita Simon Tina Ursula Vera Walter Adam Bella
    Carlos Diana Elena Fatima George Hannah Ivan Julia Kevin Laura Marco Natalia Omar Priya
    Raj Sofia Thomas Viktor Yuki Ahmed Chen Diego Elif Giulia Hiro Ingrid Jonas Kofi Liam
    Mei Noah Olivia Pablo Ravi Sara Tariq Mary James Robert Linda Susan Michael Emily Lucas
    """.split()
)

CITIES: tuple[str, ...] = (
    *(city for city in CAPITALS.values() if "," not in city),
    *"""
    Munich Hamburg Zurich Geneva Milan Naples Turin Lyon Nice Barcelona Valencia Porto Oxford
    Boston Chicago Seattle Denver Dallas Austin Miami Toronto Montreal Sydney Melbourne Osaka
    Kyoto Mumbai Shanghai Istanbul Dubai Lagos Graz Ghent Bergen Gdansk Krakow Basel
    """.split(),
    "New York",
    "San Francisco",
    "Cape Town",
    "Hong Kong",
)

JOBS: tuple[str, ...] = tuple(
    """
    teacher doctor nurse lawyer farmer baker driver pilot painter writer singer engineer
    student cook plumber designer chemist dentist judge tailor
    """.split()
)

ITEMS: tuple[str, ...] = tuple(
    """
    apples pears books pens lamps chairs tables cups plates shirts shoes hats bottles tickets
    keyboards phones cables stamps candles flowers
    """.split()
)

COLORS: tuple[str, ...] = tuple("red blue green black white pink purple yellow orange brown gray violet".split())

DAYS: tuple[str, ...] = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
