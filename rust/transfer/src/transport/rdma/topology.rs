//! Which RDMA ports this machine has, how they are addressed, and which of them are near which memory.
//!
//! Everything is read from sysfs, so a test can give another tree. A user may know better: a file overrides what is near
//! (`Overrides::parse`), a setting which GID is used.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// How a port reaches others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// By IP over Ethernet: addressed by a GID.
    Ethernet,
    /// By InfiniBand: addressed by a LID. Written from the specification, never run.
    InfiniBand,
}

/// What an entry of a port's GID table is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// RoCE v2: UDP, can be routed.
    RoceV2,
    /// InfiniBand, or RoCE v1.
    Other,
}

/// One entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the table.
    pub index: u8,
    /// The address.
    pub gid: [u8; 16],
    /// Its use.
    pub kind: GidKind,
}

impl GidEntry {
    /// Lower is better: an IPv4 address is one that somebody configured, a link-local one is just there.
    fn rank(&self) -> u8 {
        let mapped = self.gid[..10] == [0; 10] && self.gid[10..12] == [0xff; 2];
        let link_local = self.gid[0] == 0xfe && self.gid[1] & 0xc0 == 0x80;
        match (self.kind, mapped, link_local) {
            (GidKind::RoceV2, true, _) => 0,
            (GidKind::RoceV2, _, false) => 1,
            (GidKind::RoceV2, _, true) => 2,
            (GidKind::Other, true, _) => 3,
            (GidKind::Other, ..) => 4,
        }
    }
}

/// A port of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// As `ibv_devices` lists it.
    pub device: String,
    /// Numbered from 1.
    pub port: u8,
    /// What is behind it.
    pub link: LinkLayer,
    /// As sysfs says: `4: ACTIVE`.
    pub state: String,
    /// As sysfs says: `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// The memory that its PCI slot is wired to; `None` if the machine has one node, or the device is virtual.
    pub numa: Option<u32>,
    /// Its place on the PCI bus, from the root complex down; empty for a virtual device.
    pub pci: Vec<String>,
    /// Its addresses.
    pub gids: Vec<GidEntry>,
}

impl Port {
    /// The GID to use: the one that is asked for, else the best by rule (RoCE v2 IPv4 first), else the first.
    pub fn gid(&self, asked: Option<u8>) -> Option<GidEntry> {
        match asked {
            Some(index) => self.gids.iter().find(|entry| entry.index == index).copied(),
            None if self.link == LinkLayer::InfiniBand => self.gids.first().copied(),
            None => self.gids.iter().min_by_key(|entry| (entry.rank(), entry.index)).copied(),
        }
    }
}

/// Where bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// In DRAM, of this NUMA node if it is known.
    Host(Option<u32>),
    /// In a device at this place on the PCI bus (see [`Port::pci`]).
    Pci(Vec<String>),
}

/// Hops on the PCI bus between two places; `None` if they hang on different root complexes, or one is not on the bus.
pub fn pci_distance(a: &[String], b: &[String]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common > 0).then(|| a.len() + b.len() - 2 * common)
}

/// What a user says about nearness, in place of what sysfs says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(Vec<(String, Vec<String>)>);

impl Overrides {
    /// Reads lines like these; the first that fits a location counts:
    ///
    /// ```text
    /// # memory        = devices to use for it
    /// host:0          = mlx5_0 mlx5_1
    /// host            = mlx5_0
    /// pci:0000:3b:00.0 = mlx5_2
    /// ```
    ///
    /// # Errors
    /// Give up, with the line that is not understood.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut lines = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let known = |name: &str| {
                name == "host"
                    || name.strip_prefix("host:").is_some_and(|node| node.parse::<u32>().is_ok())
                    || name.starts_with("pci:")
            };
            match line.split_once('=').map(|(memory, devices)| (memory.trim(), devices)) {
                Some((memory, devices)) if known(memory) && !devices.trim().is_empty() => {
                    lines.push((memory.to_owned(), devices.split_whitespace().map(str::to_owned).collect()));
                }
                _ => {
                    return Err(Error::give_up(format!(
                        "line {number} of the topology file is not `host[:NODE] = DEVICE…` or `pci:ADDRESS = DEVICE…`: {line}"
                    )));
                }
            }
        }
        Ok(Self(lines))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// Give up: it cannot be read, or not be understood.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path)
            .map_err(|error| Error::give_up(format!("the topology file {}: {error}", path.display())))?;
        Self::parse(&text)
    }

    fn devices(&self, location: &Location) -> Option<&[String]> {
        let fits = |name: &str| match location {
            Location::Host(node) => name == "host" || node.is_some_and(|node| name == format!("host:{node}")),
            Location::Pci(place) => {
                name.strip_prefix("pci:").is_some_and(|name| place.last().is_some_and(|last| last == name))
            }
        };
        self.0.iter().find(|(name, _)| fits(name)).map(|(_, devices)| &devices[..])
    }
}

/// The ports of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// By device name and port number.
    pub ports: Vec<Port>,
    /// Other devices whose memory a card could reach: (address, place on the bus).
    pub accelerators: Vec<(String, Vec<String>)>,
    /// NUMA nodes with memory.
    pub nodes: Vec<u32>,
    overrides: Overrides,
}

impl Topology {
    /// Reads a sysfs tree (`/sys`). What is not there is not listed; nothing fails.
    pub fn read(root: &Path, overrides: Overrides) -> Self {
        let mut ports = Vec::new();
        for (device, path) in entries(&root.join("class/infiniband")) {
            let pci = place(&path.join("device"));
            let numa = text(&path.join("device/numa_node")).and_then(|node| node.parse().ok());
            for (number, path) in entries(&path.join("ports")) {
                let Ok(port) = number.parse() else { continue };
                let link = match text(&path.join("link_layer")).as_deref() {
                    Some("InfiniBand") => LinkLayer::InfiniBand,
                    _ => LinkLayer::Ethernet,
                };
                ports.push(Port {
                    device: device.clone(),
                    port,
                    link,
                    state: text(&path.join("state")).unwrap_or_default(),
                    rate: text(&path.join("rate")).unwrap_or_default(),
                    numa,
                    pci: pci.clone(),
                    gids: gids(&path),
                });
            }
        }
        ports.sort_by(|a, b| (&a.device, a.port).cmp(&(&b.device, b.port)));
        // 0x03: display controllers, which accelerators count as.
        let accelerators = entries(&root.join("bus/pci/devices"))
            .into_iter()
            .filter(|(_, path)| text(&path.join("class")).is_some_and(|class| class.starts_with("0x03")))
            .map(|(address, path)| (address, place(&path)))
            .collect();
        let mut nodes: Vec<u32> = entries(&root.join("devices/system/node"))
            .into_iter()
            .filter_map(|(name, _)| name.strip_prefix("node")?.parse().ok())
            .collect();
        nodes.sort_unstable();
        Self { ports, accelerators, nodes, overrides }
    }

    /// True for each port that should carry bytes of this memory; the others do when all of these have failed.
    ///
    /// By rule, for DRAM: the ports of its node, and those of no node; for a device: the fewest hops, else as for DRAM of
    /// no node. If none would be near, all are.
    pub fn near(&self, location: &Location) -> Vec<bool> {
        let near: Vec<bool> = match (self.overrides.devices(location), location) {
            (Some(devices), _) => self.ports.iter().map(|port| devices.contains(&port.device)).collect(),
            (None, Location::Host(node)) => {
                self.ports.iter().map(|port| node.is_none() || port.numa.is_none() || port.numa == *node).collect()
            }
            (None, Location::Pci(place)) => {
                let hops = |port: &Port| pci_distance(&port.pci, place);
                let least = self.ports.iter().filter_map(hops).min();
                self.ports.iter().map(|port| least.is_some() && hops(port) == least).collect()
            }
        };
        if near.contains(&true) { near } else { vec![true; near.len()] }
    }

    /// For a person.
    pub fn describe(&self, asked: Option<u8>) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        for port in &self.ports {
            let node = port.numa.map_or("-".into(), |node| node.to_string());
            let gid = match port.gid(asked) {
                Some(entry) => format!("gid {} = {}", entry.index, show(&entry.gid)),
                None => "no gid to use".into(),
            };
            let _ = writeln!(
                out,
                "{}/{}  {:?}  {}  {}  numa {node}  {gid}",
                port.device, port.port, port.link, port.state, port.rate
            );
        }
        if self.ports.is_empty() {
            out.push_str("no RDMA devices: /sys/class/infiniband is empty or absent\n");
            return out;
        }
        let mut row = |name: String, location: Location| {
            let near = self.near(&location);
            let list = |wanted: bool| {
                let names: Vec<String> = self
                    .ports
                    .iter()
                    .zip(&near)
                    .filter(|(_, near)| **near == wanted)
                    .map(|(port, _)| format!("{}/{}", port.device, port.port))
                    .collect();
                if names.is_empty() { "-".to_owned() } else { names.join(" ") }
            };
            let _ = writeln!(out, "{name}: {}, if they fail: {}", list(true), list(false));
        };
        for node in &self.nodes {
            row(format!("host:{node}"), Location::Host(Some(*node)));
        }
        for (address, place) in &self.accelerators {
            row(format!("pci:{address}"), Location::Pci(place.clone()));
        }
        out
    }
}

/// What `transferd topology` prints: this machine's ports and which memory they serve.
///
/// # Errors
/// Give up: the override file cannot be read or understood.
pub fn describe(overrides: Option<&Path>, gid_index: Option<u8>) -> Result<String, Error> {
    let overrides = overrides.map(Overrides::read).transpose()?.unwrap_or_default();
    Ok(Topology::read(Path::new("/sys"), overrides).describe(gid_index))
}

/// A GID as IPv6 address; an IPv4 one inside it as such.
pub fn show(gid: &[u8; 16]) -> String {
    let address = std::net::Ipv6Addr::from(*gid);
    address.to_ipv4_mapped().map_or_else(|| address.to_string(), |address| address.to_string())
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A directory's entries by name.
fn entries(path: &Path) -> Vec<(String, PathBuf)> {
    let Ok(directory) = fs::read_dir(path) else { return Vec::new() };
    let mut found: Vec<(String, PathBuf)> =
        directory.flatten().filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect();
    found.sort();
    found
}

/// Where a device hangs, from its root complex down: `pci0000:3a`, `0000:3a:00.0`, `0000:3b:00.0`.
fn place(path: &Path) -> Vec<String> {
    let Ok(path) = fs::canonicalize(path) else { return Vec::new() };
    let names = path.iter().filter_map(|part| part.to_str());
    names.skip_while(|name| !name.starts_with("pci")).map(str::to_owned).collect()
}

fn gids(port: &Path) -> Vec<GidEntry> {
    let mut found: Vec<GidEntry> = entries(&port.join("gids"))
        .into_iter()
        .filter_map(|(index, path)| {
            let gid: std::net::Ipv6Addr = text(&path)?.parse().ok()?;
            // An unused entry is all zeros, and asking for its type is an error.
            let kind = text(&port.join("gid_attrs/types").join(&index)).unwrap_or_default();
            let kind = if kind == "RoCE v2" { GidKind::RoceV2 } else { GidKind::Other };
            (!gid.is_unspecified()).then_some(GidEntry { index: index.parse().ok()?, gid: gid.octets(), kind })
        })
        .collect();
    found.sort_by_key(|entry| entry.index);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with two cards on different sockets, one accelerator beside the second, and one virtual card.
    struct Machine(PathBuf);

    impl Machine {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("topology-{}-{name}", std::process::id()));
            let machine = Self(root);
            machine.card("mlx5_0", Some((0, "pci0000:00/0000:00:01.0/0000:01:00.0")));
            machine.card("mlx5_1", Some((1, "pci0000:80/0000:80:01.0/0000:81:00.0")));
            machine.card("rxe0", None);
            let gpu = machine.write("devices/pci0000:80/0000:80:01.0/0000:82:00.0/class", "0x030200");
            machine.link("bus/pci/devices/0000:82:00.0", gpu.parent().expect("a file"));
            let bridge = machine.write("devices/pci0000:80/0000:80:01.0/class", "0x060400");
            machine.link("bus/pci/devices/0000:80:01.0", bridge.parent().expect("a file"));
            machine.write("devices/system/node/node0/meminfo", "");
            machine.write("devices/system/node/node1/meminfo", "");
            machine
        }

        fn write(&self, path: &str, text: &str) -> PathBuf {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("a file")).expect("temporary");
            fs::write(&path, format!("{text}\n")).expect("temporary");
            path
        }

        fn link(&self, path: &str, to: &Path) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().expect("a file")).expect("temporary");
            std::os::unix::fs::symlink(to, path).expect("temporary");
        }

        fn card(&self, name: &str, pci: Option<(u32, &str)>) {
            let port = |file: &str, text: &str| {
                self.write(&format!("class/infiniband/{name}/ports/1/{file}"), text);
            };
            port("link_layer", "Ethernet");
            port("state", "4: ACTIVE");
            port("rate", "100 Gb/sec (4X EDR)");
            let table = [
                ("fe80:0000:0000:0000:7485:36ff:fe9f:fe9a", "IB/RoCE v1"),
                ("fe80:0000:0000:0000:7485:36ff:fe9f:fe9a", "RoCE v2"),
                ("0000:0000:0000:0000:0000:ffff:0a63:0001", "IB/RoCE v1"),
                ("0000:0000:0000:0000:0000:ffff:0a63:0001", "RoCE v2"),
                ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
            ];
            for (index, (gid, kind)) in table.iter().enumerate() {
                port(&format!("gids/{index}"), gid);
                port(&format!("gid_attrs/types/{index}"), kind);
            }
            if let Some((node, place)) = pci {
                let numa = self.write(&format!("devices/{place}/numa_node"), &node.to_string());
                self.link(&format!("class/infiniband/{name}/device"), numa.parent().expect("a file"));
            }
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            // Left behind it would only be litter in the temporary directory.
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    // Goal: ports, addresses and nearness as sysfs has them. Method: a made-up machine.
    #[test]
    fn a_machine_is_read_from_sysfs() {
        let machine = Machine::new("read");
        let topology = Topology::read(&machine.0, Overrides::default());
        let names: Vec<&str> = topology.ports.iter().map(|port| &port.device[..]).collect();
        assert_eq!(names, ["mlx5_0", "mlx5_1", "rxe0"]);
        let port = &topology.ports[0];
        assert_eq!((port.numa, port.pci.len(), port.gids.len(), topology.ports[2].numa), (Some(0), 3, 4, None));
        assert_eq!(port.gid(None).map(|entry| (entry.index, show(&entry.gid))), Some((3, "10.99.0.1".into())));
        assert_eq!(port.gid(Some(1)).map(|entry| entry.kind), Some(GidKind::RoceV2));
        assert_eq!(port.gid(Some(4)), None, "an unused entry");
        assert_eq!(topology.nodes, [0, 1]);
        assert_eq!(topology.near(&Location::Host(Some(0))), [true, false, true]);
        assert_eq!(topology.near(&Location::Host(None)), [true, true, true]);
        let (address, gpu) = &topology.accelerators[0];
        assert_eq!((topology.accelerators.len(), &address[..]), (1, "0000:82:00.0"));
        assert_eq!(topology.near(&Location::Pci(gpu.clone())), [false, true, false]);
        assert_eq!(pci_distance(gpu, &topology.ports[1].pci), Some(2));
        assert_eq!(pci_distance(gpu, &topology.ports[0].pci), None);
        let text = topology.describe(None);
        assert!(
            text.contains("mlx5_1/1  Ethernet  4: ACTIVE  100 Gb/sec (4X EDR)  numa 1  gid 3 = 10.99.0.1"),
            "{text}"
        );
        assert!(text.contains("host:1: mlx5_1/1 rxe0/1, if they fail: mlx5_0/1"), "{text}");
        assert!(text.contains("pci:0000:82:00.0: mlx5_1/1, if they fail: mlx5_0/1 rxe0/1"), "{text}");
    }

    // Goal: a user's file wins, and a wrong one is refused with its line. Method: both.
    #[test]
    fn a_file_overrides_what_is_near() {
        let machine = Machine::new("override");
        let text = "# ours\nhost:0 = rxe0\n\nhost = mlx5_0 mlx5_1 # the rest\npci:0000:82:00.0 = mlx5_0\n";
        let topology = Topology::read(&machine.0, Overrides::parse(text).expect("well-formed"));
        assert_eq!(topology.near(&Location::Host(Some(0))), [false, false, true]);
        assert_eq!(topology.near(&Location::Host(Some(1))), [true, true, false]);
        assert_eq!(topology.near(&Location::Pci(topology.accelerators[0].1.clone())), [true, false, false]);
        for wrong in ["host:0", "host:0 =", "host:x = a", "gpu = a"] {
            let error = Overrides::parse(&format!("\n{wrong}")).expect_err(wrong);
            assert!(error.message.contains("line 2"), "{error}");
        }
        let strange = Overrides::parse("host = none_of_these").expect("well-formed");
        let topology = Topology::read(&machine.0, strange);
        assert_eq!(topology.near(&Location::Host(None)), [true, true, true], "better than none");
    }

    // Goal: no devices is a sentence, not an error. Method: an empty tree.
    #[test]
    fn a_machine_without_rdma_says_so() {
        let topology = Topology::read(Path::new("/nonexistent"), Overrides::default());
        assert!(topology.describe(None).contains("no RDMA devices"));
    }
}
