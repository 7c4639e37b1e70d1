"""The tests of every transport that `make verbs` also runs over verbs, and those that it does not, with the reason.

Files of tests/{api,engine,fault,files,ops,regressions,train}; tests/unit/support/test_verbs_contract.py sees that none
is forgotten.
"""

from __future__ import annotations

# Always: what covers each operation and each promise once.
_EACH_TIME = (
    "api/test_transports.py",
    "api/test_exact_sums.py",
    "api/test_locks.py",
    "api/test_versions.py",
    "regressions/test_fence_after_restart.py",
    "regressions/test_gone_source.py",
    "regressions/test_lost_memory.py",
)
# With SMB_LONG=1 (make verbs LONG=1): an hour and more in the virtual machine.
_WHEN_LONG = (
    "api/test_fast_path.py",
    "api/test_barriers.py",
    "api/test_named_tensors.py",
    "api/test_exactly_once.py",
    "api/test_reconnect.py",
    "api/test_wire_dtypes.py",
    "api/test_calls.py",
    "api/test_optimizer_steps.py",
    "train/test_publish.py",
)
OVER_VERBS = (*_EACH_TIME, *_WHEN_LONG)
# Of files that are left out, what needs netem, which the virtual machine's kernel has. Over no transport of ours.
OF_THE_KERNEL = ("ops/test_netlab.py::test_a_delay_is_kept",)


def chosen(long: bool) -> tuple[str, ...]:
    """Return the files to run over verbs now."""
    return OVER_VERBS if long else _EACH_TIME


_LONG = (
    "minutes in the virtual machine, and nothing that its parts, which run over verbs, do not do; SMB_TEST_FAR=verbs"
)
_TWO_COPIES = "is about buffers that are never reached over verbs"
_ELSEWHERE = "is about parts that no transport changes"
_FRAMES = "speaks the TCP protocol itself"
_TRAINING = "built on calls that run over verbs; minutes of PyTorch in the virtual machine"

LEFT_OUT = {
    "api/test_drain.py": _TWO_COPIES,
    "api/test_errors.py": "most of it is about arguments; what is about a transport is in test_reconnect.py",
    "api/test_examples.py": _TRAINING,
    "api/test_far_servers.py": _FRAMES,
    "api/test_fork.py": "a child of fork may not use its parent's client, over whatever",
    "api/test_futures.py": "futures over the same calls",
    "api/test_moves.py": "a segment that was reached over RDMA does not move; where it moves, frames go over TCP",
    "api/test_queue.py": "tests/engine/c/test_async.c has the engine's operations by reference, as over verbs",
    "api/test_relays.py": "relays are clients like others; perf/relays.py has them over TCP",
    "api/test_rename.py": _ELSEWHERE,
    "api/test_server_weights.py": _LONG,
    "api/test_second_copy.py": _TWO_COPIES,
    "api/test_session_ends.py": "tests/verbs/test_refusals.py has what ends with a session",
    "engine/test_from_python.py": "the engine without a transport's Python; tests/engine/c has its part of verbs",
    "fault/test_broken_network.py": "puts a proxy between the ends of a socket; test_daemons.py breaks the cable",
    "fault/test_coordinator_kills.py": _ELSEWHERE,
    "fault/test_drain.py": _TWO_COPIES,
    "fault/test_elastic_kills.py": _TRAINING,
    "fault/test_forgotten_connections.py": "is about TCP",
    "fault/test_histories.py": _LONG,
    "fault/test_leader_changes.py": _ELSEWHERE,
    "fault/test_partitions.py": _TWO_COPIES,
    "fault/test_random_kills.py": _LONG,
    "fault/test_second_copy.py": _TWO_COPIES,
    "fault/test_slow_clients.py": _FRAMES,
    "fault/test_stopped_holders.py": _LONG,
    "fault/test_train_hosts.py": _TWO_COPIES,
    "fault/test_train_kills.py": _TRAINING,
    "fault/test_untorn_reads.py": "tests/verbs/test_over_devices.py has it for one-sided reads",
    "files/test_copying.py": _ELSEWHERE,
    "files/test_mount.py": _ELSEWHERE,
    "files/test_mounted_names.py": _ELSEWHERE,
    "files/test_open_file.py": _ELSEWHERE,
    "ops/test_bench.py": "compares with sockets; perf/verbs.py measures verbs",
    "ops/test_cli.py": _ELSEWHERE,
    "ops/test_coordinator.py": _ELSEWHERE,
    "ops/test_doctor.py": _ELSEWHERE,
    "ops/test_etcd.py": _ELSEWHERE,
    "ops/test_leaves_nothing.py": "tests/verbs/test_daemons.py has what verbs could leave",
    "ops/test_memserver.py": _ELSEWHERE,
    "ops/test_metrics.py": _ELSEWHERE,
    "ops/test_netlab.py": "is about links that are shaped; OF_THE_KERNEL has what needs netem",
    "ops/test_page_over_http.py": _ELSEWHERE,
    "ops/test_plan.py": _ELSEWHERE,
    "ops/test_prometheus.py": _ELSEWHERE,
    "ops/test_quickstart.py": _ELSEWHERE,
    "ops/test_ray.py": "starts daemons where Ray says; over which transport is the daemons' own",
    "ops/test_supervised_daemons.py": _ELSEWHERE,
    "ops/test_top_in_tmux.py": "asks the coordinator alone",
    "regressions/test_a_call_as_a_lead_begins.py": "is about the coordinator",
    "regressions/test_who_leads_is_told_at_the_end.py": "is about the coordinator",
    "regressions/test_async_order.py": _ELSEWHERE,
    "regressions/test_call_inside_a_call.py": _ELSEWHERE,
    "regressions/test_checkout_beside_an_installation.py": "is about imports",
    "regressions/test_close_beside_stopped_daemons.py": "tests/verbs/test_closing.py has it",
    "regressions/test_close_while_reconnecting.py": "tests/verbs/test_closing.py has it",
    "regressions/test_dead_attaching_link.py": "is about shared memory",
    "regressions/test_dead_server_over_shm.py": "is about shared memory",
    "regressions/test_deleted_memory.py": "tests/verbs/test_refusals.py has it for keys",
    "regressions/test_ended_sessions_records.py": "puts a proxy between the ends of a socket",
    "regressions/test_end_of_work_units.py": _TRAINING,
    "regressions/test_fat_requests.py": "is about the coordinator",
    "regressions/test_full_unix_queue.py": "is about the Unix socket",
    "regressions/test_foreign_coordinator.py": _ELSEWHERE,
    "regressions/test_full_state_disk.py": "is about the coordinator",
    "regressions/test_given_up_write.py": "is about shared memory",
    "regressions/test_idle_names.py": "is about the control plane",
    "regressions/test_idle_client.py": "is about the control plane",
    "regressions/test_impostor_at_the_data_port.py": "is about the TCP data port",
    "regressions/test_interrupts.py": "tests/verbs has no call that hangs; the loop that looks is the same",
    "regressions/test_killed_while_connecting.py": "is about shared memory",
    "regressions/test_killed_while_waking.py": "is about shared memory",
    "regressions/test_link_after_its_client.py": "is about links of the engine",
    "regressions/test_lost_barrier.py": "tests/verbs covers what waits; the memory is lost in the control plane",
    "regressions/test_many_that_wait_for_a_leader.py": "is about the coordinator",
    "regressions/test_lying_health.py": "is about the coordinator",
    "regressions/test_memory_limit.py": "is about the control plane",
    "regressions/test_mount_with_several_coordinators.py": "is about libfuse's options",
    "regressions/test_one_of_two_is_gated.py": "is about shared memory",
    "regressions/test_outcomes.py": _ELSEWHERE,
    "regressions/test_overlapping_views.py": "is about shared memory",
    "regressions/test_deferred_once.py": "is about shared memory",
    "regressions/test_pid_namespaces.py": "is about shared memory",
    "regressions/test_private_names_are_deleted.py": _ELSEWHERE,
    "regressions/test_progress_ends_while_it_is_closed.py": "is about the thread itself",
    "regressions/test_saved_while_a_round_closes.py": _TRAINING,
    "regressions/test_slow_connect.py": _ELSEWHERE,
    "regressions/test_slow_reader.py": "shapes a link of its own",
    "regressions/test_statistics_of_the_last_batches.py": _TRAINING,
    "regressions/test_stopped_coordinator_cancels.py": _ELSEWHERE,
    "regressions/test_taken_port.py": _ELSEWHERE,
    "regressions/test_training.py": _TRAINING,
    "regressions/test_training_without_coordinator.py": _TRAINING,
    "regressions/test_zero_elements.py": "asks nobody, over whatever",
    "train/test_asp_and_ssp.py": _TRAINING,
    "train/test_checkpoint.py": "reads and writes buffers by calls that run over verbs",
    "train/test_contribution.py": _TRAINING,
    "train/test_deltas.py": _TRAINING,
    "train/test_demo.py": _TRAINING,
    "train/test_elastic_schemes.py": _TRAINING,
    "train/test_first_hour.py": _TRAINING,
    "train/test_framework_groups.py": _TRAINING,
    "train/test_frameworks.py": _TRAINING,
    "train/test_hsgd.py": _TRAINING,
    "train/test_members.py": _TRAINING,
    "train/test_meshes.py": _TRAINING,
    "train/test_near_deltas.py": "readers of mirrors choose before any transport does",
    "train/test_near_readers.py": "readers of mirrors choose before any transport does",
    "train/test_overlap.py": _TRAINING,
    "train/test_plan_calls.py": _TRAINING,
    "train/test_round_trips.py": _TRAINING,
    "train/test_r2sp.py": _TRAINING,
    "train/test_rounds.py": _TRAINING,
    "train/test_saved.py": _TRAINING,
    "train/test_shared_model.py": _TRAINING,
    "train/test_shard_publishing.py": _TRAINING,
    "train/test_status.py": _TRAINING,
    "train/test_states_on_the_page.py": _TRAINING,
    "train/test_streaming.py": _TRAINING,
    "train/test_torch_devices.py": _TRAINING,
    "train/test_two_copies.py": _TWO_COPIES,
    "train/test_vllm.py": "no engine of vLLM knows a transport",
    "train/test_work_units.py": _TRAINING,
}
