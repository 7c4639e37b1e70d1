"""The tests of every transport that `make verbs` also runs over verbs, and those that it does not, with the reason.

Files of tests/integration, tests/fault and tests/regressions; tests/unit/test_contract.py sees that none is forgotten.
"""

from __future__ import annotations

# Always: what covers each operation and each promise once.
_EACH_TIME = (
    "integration/test_transports.py",
    "integration/test_exact_sums.py",
    "integration/test_locks.py",
    "integration/test_versions.py",
    "regressions/test_fence_after_restart.py",
    "regressions/test_gone_source.py",
    "regressions/test_lost_memory.py",
)
# With SMB_LONG=1 (make verbs LONG=1): an hour and more in the virtual machine.
_WHEN_LONG = (
    "integration/test_direct.py",
    "integration/test_barriers.py",
    "integration/test_tensors.py",
    "integration/test_exactly_once.py",
    "integration/test_reconnect.py",
    "integration/test_wire.py",
    "integration/test_api.py",
    "integration/test_apply.py",
    "integration/test_publish.py",
)
OVER_VERBS = (*_EACH_TIME, *_WHEN_LONG)
# Of files that are left out, what needs netem, which the virtual machine's kernel has. Over no transport of ours.
OF_THE_KERNEL = ("integration/test_netlab.py::test_a_delay_is_kept",)


def chosen(long: bool) -> tuple[str, ...]:
    """Return the files to run over verbs now."""
    return OVER_VERBS if long else _EACH_TIME


_LONG = (
    "minutes in the virtual machine, and nothing that its parts, which run over verbs, do not do; SMB_TEST_FAR=verbs"
)
_ELSEWHERE = "is about parts that no transport changes"
_FRAMES = "speaks the TCP protocol itself"
_TRAINING = "built on calls that run over verbs; minutes of PyTorch in the virtual machine"

LEFT_OUT = {
    "fault/test_broken_network.py": "puts a proxy between the ends of a socket; test_daemons.py breaks the cable",
    "fault/test_coordinator_kills.py": _ELSEWHERE,
    "fault/test_elastic_kills.py": _TRAINING,
    "fault/test_histories.py": _LONG,
    "fault/test_random_kills.py": _LONG,
    "fault/test_slow_clients.py": _FRAMES,
    "fault/test_stopped_holders.py": _LONG,
    "fault/test_train_kills.py": _TRAINING,
    "fault/test_untorn_reads.py": "tests/verbs/test_transport.py has it for one-sided reads",
    "integration/test_async.py": "futures over the same calls",
    "integration/test_asynchronous.py": _TRAINING,
    "integration/test_bench.py": "compares with sockets; perf/verbs.py measures verbs",
    "integration/test_checkpoint.py": "reads and writes buffers by calls that run over verbs",
    "integration/test_cli.py": _ELSEWHERE,
    "integration/test_contribution.py": _TRAINING,
    "integration/test_coordinator.py": _ELSEWHERE,
    "integration/test_copying.py": _ELSEWHERE,
    "integration/test_demo.py": _TRAINING,
    "integration/test_doctor.py": _ELSEWHERE,
    "integration/test_elastic.py": _TRAINING,
    "integration/test_engine.py": "the engine without a transport's Python; tests/c has its part of verbs",
    "integration/test_errors.py": "most of it is about arguments; what is about a transport is in test_reconnect.py",
    "integration/test_examples.py": _TRAINING,
    "integration/test_fork.py": "a child of fork may not use its parent's client, over whatever",
    "integration/test_hsgd.py": _TRAINING,
    "integration/test_leaves_nothing.py": "tests/verbs/test_daemons.py has what verbs could leave",
    "integration/test_memserver.py": _ELSEWHERE,
    "integration/test_metrics.py": _ELSEWHERE,
    "integration/test_mount.py": _ELSEWHERE,
    "integration/test_mount_names.py": _ELSEWHERE,
    "integration/test_netlab.py": "is about links that are shaped; OF_THE_KERNEL has what needs netem",
    "integration/test_open_file.py": _ELSEWHERE,
    "integration/test_page.py": _ELSEWHERE,
    "integration/test_prometheus.py": _ELSEWHERE,
    "integration/test_quickstart.py": _ELSEWHERE,
    "integration/test_r2sp.py": _TRAINING,
    "integration/test_rename.py": _ELSEWHERE,
    "integration/test_service.py": _ELSEWHERE,
    "integration/test_session_ends.py": "tests/verbs/test_refusals.py has what ends with a session",
    "integration/test_torch_adapter.py": _TRAINING,
    "integration/test_train_members.py": _TRAINING,
    "integration/test_train_metrics.py": _TRAINING,
    "integration/test_train_rounds.py": _TRAINING,
    "integration/test_train_work.py": _TRAINING,
    "integration/test_weights.py": _LONG,
    "regressions/test_async_order.py": _ELSEWHERE,
    "regressions/test_call_inside_a_call.py": _ELSEWHERE,
    "regressions/test_close_beside_stopped_daemons.py": "tests/verbs/test_closing.py has it",
    "regressions/test_close_while_reconnecting.py": "tests/verbs/test_closing.py has it",
    "regressions/test_dead_server_over_shm.py": "is about shared memory",
    "regressions/test_deleted_memory.py": "tests/verbs/test_refusals.py has it for keys",
    "regressions/test_ended_sessions_records.py": "puts a proxy between the ends of a socket",
    "regressions/test_fat_requests.py": "is about the coordinator",
    "regressions/test_foreign_coordinator.py": _ELSEWHERE,
    "regressions/test_full_state_disk.py": "is about the coordinator",
    "regressions/test_given_up_write.py": "is about shared memory",
    "regressions/test_idle_names.py": "is about the control plane",
    "regressions/test_impostor_at_the_data_port.py": "is about the TCP data port",
    "regressions/test_interrupts.py": "tests/verbs has no call that hangs; the loop that looks is the same",
    "regressions/test_killed_while_connecting.py": "is about shared memory",
    "regressions/test_killed_while_waking.py": "is about shared memory",
    "regressions/test_link_after_its_client.py": "is about links of the engine",
    "regressions/test_lying_health.py": "is about the coordinator",
    "regressions/test_memory_limit.py": "is about the control plane",
    "regressions/test_outcomes.py": _ELSEWHERE,
    "regressions/test_overlapping_views.py": "is about shared memory",
    "regressions/test_parked_once.py": "is about shared memory",
    "regressions/test_pid_namespaces.py": "is about shared memory",
    "regressions/test_progress_ends_while_it_is_closed.py": "is about the thread itself",
    "regressions/test_slow_connect.py": _ELSEWHERE,
    "regressions/test_slow_reader.py": "shapes a link of its own",
    "regressions/test_taken_port.py": _ELSEWHERE,
    "regressions/test_training.py": _TRAINING,
    "regressions/test_zero_elements.py": "asks nobody, over whatever",
}
