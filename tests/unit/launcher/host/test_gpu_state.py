"""Problems of a node in the output of nvidia-smi and the kernel. The documents are modelled on drivers 535 to 580;
there is no node here to record one."""

from __future__ import annotations

import resource

import pytest

from launcher.host import health
from launcher.host.gpu_state import (
    FATAL_XIDS,
    gpu_problems,
    limit_problems,
    network_gbps,
    nvlink_problems,
    xid_problems,
)
from launcher.host.health import check_state, examine

GPU = """<gpu id="00000000:1B:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <compute_mode>{mode}</compute_mode>
  <pci><pci_gpu_link_info><link_widths>
    <max_link_width>16x</max_link_width><current_link_width>{width}</current_link_width>
  </link_widths></pci_gpu_link_info></pci>
  <clocks_{reasons}_reasons>
    <clocks_{reasons}_reason_gpu_idle>Active</clocks_{reasons}_reason_gpu_idle>
    <clocks_{reasons}_reason_sw_power_cap>Active</clocks_{reasons}_reason_sw_power_cap>
    <clocks_{reasons}_reason_hw_thermal_slowdown>{hot}</clocks_{reasons}_reason_hw_thermal_slowdown>
    <clocks_{reasons}_reason_hw_power_brake_slowdown>{brake}</clocks_{reasons}_reason_hw_power_brake_slowdown>
  </clocks_{reasons}_reasons>
  <ecc_errors>
    <volatile>
      <sram_correctable>5</sram_correctable><sram_uncorrectable_parity>{parity}</sram_uncorrectable_parity>
      <dram_correctable>7</dram_correctable><dram_uncorrectable>{dram}</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>99</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows>
    <remapped_row_pending>{pending}</remapped_row_pending><remapped_row_failure>{failure}</remapped_row_failure>
  </remapped_rows>
  <fabric><state>{state}</state><status>{status}</status></fabric>
  <processes>{processes}</processes>
</gpu>"""
PROCESS = """<process_info><pid>{pid}</pid><type>{type}</type><process_name>{name}</process_name>
  <used_memory>{used}</used_memory></process_info>"""


def smi(**gpu: str) -> str:
    """A document of a sound GPU and one that is like this."""
    sound = {"width": "16x", "reasons": "event", "hot": "Not Active", "brake": "Not Active", "state": "Completed"}
    sound |= {
        "status": "Success",
        "processes": "",
        "parity": "0",
        "dram": "0",
        "mode": "Default",
        "pending": "No",
        "failure": "No",
    }
    return f"<nvidia_smi_log>{GPU.format(**sound)}{GPU.format(**sound | gpu)}</nvidia_smi_log>"


def process(**values: str) -> str:
    return PROCESS.format(**{"pid": "77", "type": "C", "name": "python", "used": "60000 MiB"} | values)


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        ({}, None),
        ({"processes": process()}, "GPU 1 is used by process 77 (python, 60000 MiB)"),
        ({"processes": process(type="G", name="Xorg")}, None),
        ({"processes": process(used="12 MiB", name="nvidia-cuda-mps-server")}, None),
        ({"hot": "Active"}, "GPU 1 is slowed down: its hardware is too hot"),
        ({"hot": "Active", "reasons": "throttle"}, "GPU 1 is slowed down: its hardware is too hot"),
        ({"brake": "Active"}, "GPU 1 is slowed down: the power supply slows it"),
        ({"width": "8x"}, "GPU 1 has 8 of its 16 PCIe lanes"),
        ({"width": "N/A"}, None),
        ({"parity": "1", "dram": "2"}, "GPU 1 has 3 uncorrectable memory errors"),
        ({"dram": "N/A"}, None),
        ({"failure": "Yes"}, "GPU 1 cannot remap a broken memory row"),
        ({"pending": "Yes"}, "GPU 1 waits for a reset to remap a broken memory row"),
        (
            {"state": "In Progress", "status": "N/A"},
            "GPU 1 is not in the NVLink fabric: In Progress, N/A (fabric manager)",
        ),
        ({"state": "N/A", "status": "N/A"}, None),
        ({"status": "Failure"}, "GPU 1 is not in the NVLink fabric: Completed, Failure (fabric manager)"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_gpu(gpu, problem):
    assert gpu_problems(smi(**gpu)) == ([problem] if problem else [])
    assert check_state(smi(**gpu)).problems == gpu_problems(smi(**gpu))
    assert check_state("No devices were found").problems == []


def test_links_between_gpus_are_counted():
    gpu = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-{})\n"
    links = [f"\t Link {link}: 26.562 GB/s\n" for link in range(18)]
    sound = gpu.format(0, "a") + "".join(links)
    assert nvlink_problems(sound + gpu.format(1, "b") + "".join(links)) == []
    lost = gpu.format(1, "b") + "".join(links[:17]) + "\t Link 17: <inactive>\n"
    assert nvlink_problems(sound + lost) == ["GPU 1 has 17 of 18 NVLinks"]
    assert nvlink_problems("") == []


def test_only_active_ports_of_the_network_count():
    ports = [
        ("4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("1: DOWN", "10 Gb/sec (4X SDR)"),
    ]
    assert network_gbps([*ports, ("", "")]) == 600.0


@pytest.mark.parametrize(
    ("mode", "shared", "said"),
    [
        ("Default", True, None),
        ("Exclusive_Process", False, None),
        ("Exclusive_Process", True, "GPU 1 is in compute mode Exclusive_Process, and vLLM shares it with a rank; "),
        ("Prohibited", False, "GPU 1 is in compute mode Prohibited; `nvidia-smi -c DEFAULT`"),
    ],
)
def test_a_mode_of_a_gpu_that_refuses_a_process_of_the_run(mode: str, shared: bool, said: str | None) -> None:
    problems = gpu_problems(smi(mode=mode), shared)
    assert len(problems) == (said is not None)
    assert said is None or problems[0].startswith(said)


def test_limits_that_no_rank_can_raise():
    assert limit_problems(-1, 1 << 20, rdma=True) == []
    assert "locked memory is limited to 64 KiB" in limit_problems(64 << 10, -1, rdma=True)[0]
    assert limit_problems(64 << 10, -1, rdma=False) == []
    assert limit_problems(-1, 1024, rdma=False) == ["open files are limited to 1024, 4096 are needed"]


def test_a_node_reports_its_network_and_its_limits(tmp_path, monkeypatch):
    port = tmp_path / "rdma" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    tool = tmp_path / "nvidia-smi"
    document = smi(processes=process())
    tool.write_text(
        f"#!/bin/sh\ncase $1 in -L) echo 'GPU 0: x'; echo 'GPU 1: x' ;; -q) cat <<E\n{document}\nE\n;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(health, "RDMA", str(tmp_path / "rdma"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    report, _ = examine(tmp_path / "health", "n1", 2)
    assert report.network_gbps == 400.0
    said = "\n".join(report.problems)
    assert "locked memory is limited to 1 KiB" in said
    assert "GPU 1 is used by process 77" in said


def xid_line(text: str, at: float = 9000.5) -> str:
    return f"[{at:12.6f}] NVRM: Xid (PCI:0000:5d:00): {text}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("79, pid=3, GPU has fallen off the bus.", "79 (GPU has fallen off the bus)"),
        (
            "119, pid=9, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
            "119 (GPU firmware does not answer)",
        ),
        ("140, pid='<unknown>', name=<unknown>, An uncorrectable ECC error", "140 (unrecovered ECC error)"),
        (
            "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "154 (GPU needs a recovery)",
        ),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", None),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)", "149 (NVLink error)"),
        ("149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08 (0x004505c6 0x00000000)", None),
        ("13, pid=2, Graphics SM Warp Exception", None),
        ("31, pid=2, Ch 00000001, MMU Fault", None),
        ("43, pid=2, Ch 00000001", None),
        ("45, pid=2, Ch 00000001", None),
        ("63, pid='<unknown>', Row Remapper: New row marked for remapping", None),
        ("94, pid=2, Contained: SM", None),
        ("4711, of a driver that is not written yet", None),
    ],
)
def test_only_errors_after_which_a_gpu_must_be_reset_condemn_it(text: str, named: str | None) -> None:
    log = f"{xid_line(text)}\n[ 9200.000000] eth0: link up"
    assert xid_problems(log, 9300.0) == ([f"GPU at 0000:5d:00: Xid {named}"] if named else [])


def test_an_old_error_is_somebody_elses_and_a_repeated_one_is_said_once() -> None:
    log = f"{xid_line('79, GPU', at=10.0)}\n{xid_line('79, GPU')}\n{xid_line('79, GPU', at=9001.0)}"
    assert len(xid_problems(log, 9300.0)) == 1
    assert xid_problems(log, 99999.0) == []


def test_no_error_of_an_application_is_held_against_a_gpu() -> None:
    assert not {8, 11, 13, 25, 31, 32, 43, 44, 45, 63, 68, 69, 92, 94} & set(FATAL_XIDS)
