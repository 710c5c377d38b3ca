"""A plugin of pytest: torchft's own tests run on `ProcessGroupTrigram` where they name `ProcessGroupGloo`."""

import torchft
import torchft.process_group

from trigram.integrations.torchft import ProcessGroupTrigram

torchft.ProcessGroupGloo = torchft.process_group.ProcessGroupGloo = ProcessGroupTrigram
