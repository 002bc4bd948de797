"""Texts for the real model: questions that it answers, and a story whose perplexity it has."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue in one sentence.",
    "List three prime numbers above 100.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Say hello.",
    "Summarise: The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
)
TEXT = """The lighthouse had stood on the rocks for more than a hundred years before anyone thought of writing down its
history. Fishermen told their children about the winter when the sea froze along the coast, and about the keeper who
walked across the ice to bring bread to the village. In those days the lamp burned oil, and somebody had to climb the
stairs every four hours to fill it, clean the glass and wind the machine that turned the light. When electricity came,
the work became easier, but the keepers stayed, because storms still broke the cables and ships still needed a signal.
Today the lamp is controlled by a computer in a city far away. A small museum on the ground floor shows the old
instruments, a few photographs and the book in which every keeper wrote the weather of the day. Visitors come in the
summer, climb the two hundred steps and look out over the water. Most of them say that the view is worth the effort.
The last keeper, who is now an old woman, lives in a white house near the harbour. She says that she does not miss the
cold nights, but that she sometimes wakes up at four in the morning and listens for the wind.""".replace("\n", " ")
