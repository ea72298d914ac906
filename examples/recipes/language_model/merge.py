"""Put what LoRA has learned into the weights, and save the model for transformers.

python merge.py runs/language_model merged
"""

import sys

from model import FineTune, merge_lora

if __name__ == "__main__":
    run, target = sys.argv[1:]
    model = FineTune.load_from_checkpoint(f"{run}/checkpoints/last.ckpt")
    merge_lora(model.network)
    model.network.save_pretrained(target)
    print(f"{target} has the merged model.")
