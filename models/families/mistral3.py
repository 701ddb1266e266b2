"""Mistral Small 3.1 and later, and Ministral 3: a text model with a vision tower."""

from rptrain.models.families.text_tower import TextTower

TOWER = TextTower(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    text_types=("mistral", "ministral3"),
    prefixes=(
        ("model.", "model.language_model.", "language_model.model."),
        ("lm_head.", "lm_head.", "language_model.lm_head."),
    ),
    carried=("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
)
