//! An engine's counters as Prometheus samples.

use std::sync::atomic::Ordering;

use crate::endpoint::Shared;
use crate::mover::Histogram;

/// Samples as (name with labels, value).
pub(super) fn samples(shared: &Shared) -> Vec<(String, u64)> {
    let node = &shared.me.node;
    let plain = |name: &str, value| (format!(r#"pyengine_engine_{name}{{node="{node}"}}"#), value);
    let mut samples = vec![
        plain("fenced_total", shared.regions.fenced()),
        plain("regions", shared.regions.ids().len() as u64),
        plain("notifications_waiting", shared.inbox.len() as u64),
        plain("refused_connections_total", shared.refused.load(Ordering::Relaxed)),
    ];
    for (kind, served) in shared.doors.served() {
        let mut add = |name: &str, more: &str, value: u64| {
            let transport = kind.name();
            samples.push((
                format!(r#"pyengine_engine_served_{name}{{node="{node}",transport="{transport}",{more}}}"#),
                value,
            ));
        };
        add("bytes_total", r#"direction="written""#, served.bytes_written);
        add("bytes_total", r#"direction="read""#, served.bytes_read);
        add("copies_total", r#"outcome="done""#, served.done);
        add("copies_total", r#"outcome="corrupt""#, served.corrupt);
        add("copies_total", r#"outcome="fenced""#, served.fenced);
        add("copies_total", r#"outcome="denied""#, served.denied);
    }
    for stats in shared.driver.stats() {
        let peer = &stats.peer;
        let of_peer = |name: &str, value| (format!(r#"pyengine_engine_{name}{{node="{node}",peer="{peer}"}}"#), value);
        samples.push(of_peer("transfers", stats.transfers));
        samples.push(of_peer("queued_copies", stats.parts));
        for (kind, path) in stats.paths {
            let labels = format!(r#"node="{node}",peer="{peer}",transport="{}""#, kind.name());
            let mut add = |name: &str, more: &str, value: u64| {
                samples.push((format!("pyengine_engine_{name}{{{labels}{more}}}"), value));
            };
            add("bytes_total", r#",direction="written""#, path.bytes_written);
            add("bytes_total", r#",direction="read""#, path.bytes_read);
            add("copies_in_flight", "", path.copies_in_flight);
            add("bytes_in_flight", "", path.bytes_in_flight);
            add("retries_total", "", path.retries);
            add("rests_total", "", path.rests);
            for (outcome, count) in [
                ("done", path.copies),
                ("fenced", path.fenced),
                ("denied", path.denied),
                ("corrupt", path.corrupt),
                ("lost", path.lost),
            ] {
                add("copies_total", &format!(r#",outcome="{outcome}""#), count);
            }
            let counts = path.latency.counts();
            let mut sum = 0;
            for (bucket, count) in counts.iter().enumerate() {
                sum += count;
                let bound = if bucket + 1 < counts.len() {
                    (Histogram::bound(bucket) / 1000).to_string()
                } else {
                    "+Inf".into()
                };
                add("copy_microseconds_bucket", &format!(r#",le="{bound}""#), sum);
            }
            add("copy_microseconds_sum", "", path.latency.sum() / 1000);
            add("copy_microseconds_count", "", sum);
        }
    }
    samples
}
