"""The files of a training: checkpoints, digests of weights, the record of the training, and the model card."""
