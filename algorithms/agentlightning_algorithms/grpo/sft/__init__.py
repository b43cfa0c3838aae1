"""The algorithm ``sft``: supervised fine-tuning of a model's weights."""
