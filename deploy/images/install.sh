#!/bin/sh
# In a build stage: makes the virtual environment /opt/pipelinerl out of a requirements file and of the package in the working
# directory. No bytecode yet.
#   install.sh requirements/images/verifier.txt
set -eu
requirements=$1
pip="/opt/pipelinerl/bin/python -m pip --disable-pip-version-check --no-cache-dir"

python3 -m venv /opt/pipelinerl
$pip install --no-compile --no-deps --require-hashes -r requirements/images/build.txt
case $requirements in
*-cpu.txt) deploy/images/install_torch.sh "$requirements" /opt/pipelinerl/bin/python --no-cache-dir --no-compile ;;
esac
$pip install --no-compile --no-deps --require-hashes --no-build-isolation -r "$requirements"
$pip install --no-compile --no-deps --no-build-isolation .
grep -q '^setuptools==' "$requirements" || $pip uninstall --yes setuptools
$pip uninstall --yes pip
