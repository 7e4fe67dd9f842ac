"""Every setting of a run, once, with its meaning, unit and default.

`load_config` makes a `Config` from four layers; the later wins:

    defaults  <  --config FILE.yaml  <  named flags  <  section.key=value words

    section files, schema   the settings, and what holds between them
    reading                 YAML and words to a config
    problems, hints         what is wrong with a setting, and what may be meant
    printing, values        a config to YAML, and to arguments; which values a key takes
    spec                    the parts of a resolved run, which the rest of the program gets

A `Config` is checked when it is made. The docstrings of the keys are the comments that
`easyrl config` prints, and the text of docs/settings.md.
"""

from easyrl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from easyrl.config.data import DataConfig as DataConfig
from easyrl.config.printing import on_one_line as on_one_line
from easyrl.config.printing import to_arguments as to_arguments
from easyrl.config.printing import to_commented_yaml as to_commented_yaml
from easyrl.config.printing import yaml_value as yaml_value
from easyrl.config.problems import find_keys as find_keys
from easyrl.config.problems import key_hint as key_hint
from easyrl.config.reading import change_config as change_config
from easyrl.config.reading import load_config as load_config
from easyrl.config.reading import move_inputs as move_inputs
from easyrl.config.reading import read_words as read_words
from easyrl.config.reward import JudgeConfig as JudgeConfig
from easyrl.config.reward import RewardConfig as RewardConfig
from easyrl.config.schema import EVAL_OPTIONS as EVAL_OPTIONS
from easyrl.config.schema import INPUTS as INPUTS
from easyrl.config.schema import KEYS as KEYS
from easyrl.config.schema import OPTIONS as OPTIONS
from easyrl.config.schema import SECTIONS as SECTIONS
from easyrl.config.schema import Config as Config
from easyrl.config.schema import by_name as by_name
from easyrl.config.schema import keys_marked as keys_marked
from easyrl.config.schema import options_by_key as options_by_key
from easyrl.formatting import ConfigError as ConfigError
