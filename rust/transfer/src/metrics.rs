//! Samples as Prometheus reads them: text format 0.0.4.

use std::fmt::Write;

/// What each family of samples says. One that is not listed is shown without.
const HELP: [(&str, &str); 32] = [
    ("pyengine_transfer_bytes_total", "Bytes of whole blocks that crossed between nodes, verified at the destination"),
    ("pyengine_transfer_blocks_total", "Whole blocks that crossed between nodes, or were handed over within the arena"),
    ("pyengine_transfer_retries_total", "Copies that were sent again"),
    ("pyengine_pool_blocks", "Slots of the pool by tier and state; the states of a tier add up to its size"),
    (
        "pyengine_pool_grants",
        "Grants that are held, that wait, and of these those that wait within their owner's quota",
    ),
    ("pyengine_pool_kept_blocks", "Blocks that somebody has pinned for a time"),
    ("pyengine_pool_kept_bytes", "Bytes of blocks that somebody has pinned for a time"),
    ("pyengine_pool_kept_limit_bytes", "Bytes that may be pinned for a time, all together"),
    (
        "pyengine_tier_over_quota_total",
        "Times that a block was not written to a medium, as its owner has his quota there",
    ),
    ("pyengine_pool_evictions_total", "Blocks that were removed to make room"),
    ("pyengine_pool_hits_total", "Keys that grants, lookups and fetches have found"),
    ("pyengine_pool_misses_total", "Keys that grants and lookups have not found"),
    ("pyengine_pool_dropped_total", "Blocks that were evicted and are on no medium of this node any more"),
    ("pyengine_pool_demotions_total", "Blocks that were written from DRAM to SSD"),
    ("pyengine_pool_demoted_bytes_total", "Bytes of blocks that were written from DRAM to SSD"),
    ("pyengine_pool_promotions_total", "Blocks that were read from SSD into DRAM"),
    ("pyengine_pool_promoted_bytes_total", "Bytes of blocks that were read from SSD into DRAM"),
    (
        "pyengine_single_flight_total",
        "Wanted blocks that waited for a read already under way instead of one of their own",
    ),
    ("pyengine_fetches_abandoned_total", "Fetches that a peer did not answer in time: the blocks were asked of others"),
    ("pyengine_tier_limit_bytes", "Bytes that a medium may take"),
    ("pyengine_tier_used_bytes", "Bytes that a medium takes, with all it keeps for itself"),
    ("pyengine_tier_waiting_bytes", "Bytes that wait to be written to a medium"),
    ("pyengine_tier_refused_writes_total", "Writes that a medium had no room for, or failed at"),
    ("pyengine_tier_trouble", "How a medium does. 0: good, 1: reads only, 2: failed"),
    ("pyengine_checksum_failures_total", "Checksums that did not hold, by where the bytes were damaged"),
    ("pyengine_fenced_writes_total", "Writes that were refused because the life of their slot was over"),
    ("pyengine_daemon_uptime_seconds", "Since this life of the daemon began"),
    ("pyengine_daemon_draining", "1 while nothing new is taken on"),
    ("pyengine_daemon_clients", "Local workers that are attached"),
    ("pyengine_daemon_peers", "Other daemons with which a session stands"),
    ("pyengine_daemon_conductor_connected", "1 while the conductor is connected"),
    ("pyengine_daemon_info", "Always 1; its labels say who this is"),
];

/// What a family says, if it is known.
pub fn help(family: &str) -> Option<&'static str> {
    HELP.iter().find(|(name, _)| *name == family).map(|(_, help)| *help)
}

/// The text: families in the order of their first sample, each once.
pub fn render(samples: &[(String, u64)]) -> String {
    let family = |sample: &str| sample.split('{').next().unwrap_or(sample).to_owned();
    let mut families: Vec<(String, Vec<&(String, u64)>)> = Vec::new();
    for sample in samples {
        let name = family(&sample.0);
        match families.iter_mut().find(|(known, _)| *known == name) {
            Some((_, list)) => list.push(sample),
            None => families.push((name, vec![sample])),
        }
    }
    let mut text = String::new();
    for (name, samples) in families {
        // Writing to a string cannot fail.
        if let Some(help) = help(&name) {
            let _ = writeln!(text, "# HELP {name} {help}");
        }
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let _ = writeln!(text, "# TYPE {name} {kind}");
        for (sample, value) in samples {
            let _ = writeln!(text, "{sample} {value}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    //! Goal: a family is announced once, before its samples, though they come mixed. Method: an example.
    use super::*;

    #[test]
    fn families_are_together() {
        let samples = [
            (r#"pyengine_pool_hits_total{node="a"}"#, 1),
            (r#"pyengine_unheard_of{node="a"}"#, 2),
            (r#"pyengine_pool_hits_total{node="b"}"#, u64::MAX),
        ];
        let text = render(&samples.map(|(name, value)| (name.to_owned(), value)));
        let expected = "# HELP pyengine_pool_hits_total Keys that grants, lookups and fetches have found\n\
                        # TYPE pyengine_pool_hits_total counter\n\
                        pyengine_pool_hits_total{node=\"a\"} 1\n\
                        pyengine_pool_hits_total{node=\"b\"} 18446744073709551615\n\
                        # TYPE pyengine_unheard_of gauge\n\
                        pyengine_unheard_of{node=\"a\"} 2\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn every_help_is_one_line_and_every_family_is_listed_once() {
        for (index, (name, help)) in HELP.iter().enumerate() {
            assert!(!help.contains(['\n', '\\']) && HELP[..index].iter().all(|(other, _)| other != name), "{name}");
        }
    }
}
