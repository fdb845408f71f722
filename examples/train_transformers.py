"""Hugging Face Trainer with gpuwatch: one callback. `python examples/train_transformers.py`"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gpuwatch.integrations.transformers import GpuWatchCallback

config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
data = [{"input_ids": torch.randint(100, (16,)), "labels": torch.tensor(index % 2)} for index in range(256)]

trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=data,
    eval_dataset=data[:64],
    callbacks=[GpuWatchCallback(run="transformers example")],
)
trainer.train()
