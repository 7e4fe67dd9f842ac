"""What the embedded engine stores of the tokens that it has computed: a tree of nodes (`nodes`),
what layers keep for them (`stores`), both together (`cache`), and a step's layout: attention to it
(`attention`), and layers with a state (`states`)."""
