"""Validates parameters at submission and before running."""

from __future__ import annotations

from pydantic import ValidationError

from pipeline.config import brief, explain
from pipeline.errors import ParameterError
from pipeline.service.roots import DataRoots
from pipeline.service.store import NewJob
from pipeline.workloads import LOCAL_ONLY, Parameters, workload_named, workloads


def parameters_of(asked: NewJob, roots: DataRoots) -> Parameters:
    """A job's parameters. ParameterError if the workload is unknown, a parameter is wrong, or a file that one names
    lies outside the roots."""
    if asked.workload in LOCAL_ONLY:
        raise ParameterError(f"workload: a service does not run {asked.workload}; `millrace run {asked.workload}` does")
    try:
        parameters = workload_named(asked.workload).Parameters(**asked.parameters)
    except KeyError as error:
        known = ", ".join(workloads())
        raise ParameterError(f"workload: there is no {asked.workload!r}; there are {known}") from error
    except ValidationError as error:
        fault = error.errors()[0]
        where = f"parameters.{brief(str(fault['loc'][0]))}: " if fault["loc"] else "parameters: "
        raise ParameterError(f"{where}{explain(fault)}") from error
    roots.check_further(parameters.further_files)
    return parameters
