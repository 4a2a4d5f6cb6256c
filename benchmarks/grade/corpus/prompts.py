"""What the models of the corpus are asked: the kinds of text that people ask assistants for."""

PROMPTS = {
    "france": "What is the capital of France? Answer in one sentence.",
    "story": "Write a 300-word story about a cat named Whiskers who discovers a rooftop garden.",
    "fibonacci": (
        "Write an iterative Python function that returns the n-th Fibonacci number, with a"
        " docstring."
    ),
    "json": (
        "Give a JSON list of five European countries with the fields name, capital and population."
    ),
    "spanish": "Escribe un párrafo corto sobre la vida en un pueblo de la costa.",
    "photosynthesis": "Explain photosynthesis to a ten-year-old child.",
    "email": (
        "Write a polite email to a colleague asking to move a meeting from Tuesday to Thursday."
    ),
    "recipe": "Give me a recipe for vegetable soup with ingredients and numbered steps.",
    "poem": "Write a short poem about the sea in autumn.",
    "table": "Make a Markdown table that compares cats, dogs and hamsters as pets.",
    "sql": (
        "Write an SQL query that lists the ten customers with the highest total of orders in 2023."
    ),
    "history": "Summarise the causes of the First World War in one paragraph.",
    "sums": (
        "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps."
    ),
    "list": "List ten ideas for a rainy afternoon at home.",
}
"""Asked of every model of the corpus."""

MORE_PROMPTS = {
    "dialogue": "Write a dialogue between a baker and a customer who wants a birthday cake.",
    "gravity": "What is gravity?",
    "html": "Write a minimal HTML page with a heading, a paragraph and a list of three links.",
    "interview": "Give five questions for a job interview of a nurse, with good answers.",
    "travel": "Plan a weekend in Rome for a family with two children.",
    "regex": "Explain what the regular expression ^[a-z]+@[a-z]+\\.com$ matches.",
    "review": "Write a review of a small Italian restaurant.",
    "budget": "How can a student save money every month?",
    "volcano": "Describe how a volcano erupts.",
    "french": "Traduis en français : The weather is nice today and we are going to the park.",
    "haiku": "Write three haiku about winter.",
    "bash": "Write a shell script that renames all .jpeg files in a folder to .jpg.",
    "speech": "Write the opening of a speech at a wedding.",
    "planets": "List the planets of the solar system with one fact each.",
    "letter": "Write a letter from a grandfather to his grandson about his childhood.",
    "sleep": "Why do people need sleep?",
    "sorting": "Explain bubble sort with an example.",
    "garden": "What should I plant in a small garden in spring?",
    "fable": "Write a fable about a fox and a stork.",
    "computer": "Explain the difference between RAM and a hard disk.",
    "news": "Write a short news report about a bridge that opened today.",
    "chess": "Explain how the knight moves in chess.",
    "css": "Write CSS for a centred blue button with rounded corners.",
    "dream": "Describe a strange dream in the first person.",
    "exercise": "Suggest a ten-minute exercise routine for the office.",
    "german": "Schreibe drei Sätze über deinen Lieblingssport.",
}
"""Asked of the healthy model as well."""
