//! Counters of one daemon, named as Prometheus samples.

use crate::pool::tier::Capacity;
use crate::pool::{Occupancy, Tally};
use crate::types::Kind;

/// Blocks that crossed between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Whole blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Moved {
    /// Counts blocks of one size.
    pub fn add(&mut self, blocks: u64, block_bytes: u64) {
        self.blocks += blocks;
        self.bytes += blocks * block_bytes;
    }
}

/// What the engine counts itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sent to peers, by transport: applied and verified there.
    pub sent: [Moved; Kind::ALL.len()],
    /// Received from peers and committed here, by transport.
    pub received: [Moved; Kind::ALL.len()],
    /// Blocks handed over within this arena.
    pub blocks_arena: u64,
    /// Checksums that did not hold after crossing a network, the arena being innocent.
    pub corrupt_wire: u64,
    /// Checksums that did not hold on bytes of this arena.
    pub corrupt_arena: u64,
    /// Copies sent again.
    pub retries: u64,
    /// Written to the tier.
    pub demotions: Moved,
    /// Read from it and committed here.
    pub promotions: Moved,
    /// Blocks wanted by somebody that were on the tier.
    pub hits_ssd: u64,
    /// Blocks whose bytes on the tier were not those that were written.
    pub corrupt_tier: u64,
    /// Writes that the tier had no room for, or that failed.
    pub tier_refused: u64,
    /// Fetches that a peer did not answer in time.
    pub fetches_late: u64,
    /// Blocks that were not written, as their owner has all he may there.
    pub tier_over_quota: u64,
    /// Wants that waited for a block that was on its way for somebody else.
    pub single_flights: u64,
}

/// All that the samples are made of.
#[derive(Clone, Copy, Debug, Default)]
pub struct Snapshot {
    /// The engine's own.
    pub stats: Stats,
    /// The pool's slots.
    pub occupancy: Occupancy,
    /// The pool's history.
    pub tally: Tally,
    /// Grants (held, waiting).
    pub grants: (usize, usize),
    /// Writes refused because the slot's life was over.
    pub fenced: u64,
    /// The tier's numbers, if there is one.
    pub tier: Option<Capacity>,
    /// What is kept (blocks, bytes), and most bytes that may be.
    pub kept: (u64, u64),
    /// See there.
    pub keep_limit: u64,
    /// Grants that wait for slots of their own accounts.
    pub blocked: usize,
}

impl Snapshot {
    /// Samples as (name with labels, value); the given transports show even if nothing has gone over them yet.
    pub fn samples(&self, node: &str, transports: &[Kind]) -> Vec<(String, u64)> {
        let Self { stats, occupancy, tally, grants, fenced, tier, kept, keep_limit, blocked } = self;
        let bytes = "pyengine_transfer_bytes_total";
        let blocks = "pyengine_transfer_blocks_total";
        let pool = |state: &str| format!(r#"pyengine_pool_blocks{{node="{node}",tier="dram",state="{state}"}}"#);
        let way = |name: &str, transport: &str, direction: &str| {
            format!(r#"{name}{{transport="{transport}",direction="{direction}",node="{node}"}}"#)
        };
        let label = |name: &str, key: &str, value: &str| format!(r#"{name}{{node="{node}",{key}="{value}"}}"#);
        let plain = |name: &str| format!(r#"{name}{{node="{node}"}}"#);
        let mut samples = Vec::new();
        for kind in Kind::ALL {
            let (sent, received) = (stats.sent[kind as usize], stats.received[kind as usize]);
            if transports.contains(&kind) || sent.blocks + received.blocks > 0 {
                samples.extend([
                    (way(bytes, kind.name(), "out"), sent.bytes),
                    (way(bytes, kind.name(), "in"), received.bytes),
                    (way(blocks, kind.name(), "out"), sent.blocks),
                    (way(blocks, kind.name(), "in"), received.blocks),
                ]);
            }
        }
        samples.extend([
            (way(blocks, "arena", "out"), stats.blocks_arena),
            (way(blocks, "arena", "in"), stats.blocks_arena),
            (pool("free"), occupancy.free.into()),
            (pool("cached"), occupancy.cached.into()),
            (pool("pinned"), occupancy.pinned.into()),
            (pool("reserved"), occupancy.reserved.into()),
            (pool("quarantine"), occupancy.quarantine.into()),
            (label("pyengine_pool_grants", "state", "held"), grants.0 as u64),
            (label("pyengine_pool_grants", "state", "waiting"), grants.1 as u64),
            (label("pyengine_pool_grants", "state", "over_quota"), *blocked as u64),
            (plain("pyengine_pool_kept_blocks"), kept.0),
            (plain("pyengine_pool_kept_bytes"), kept.1),
            (plain("pyengine_pool_kept_limit_bytes"), *keep_limit),
            (label("pyengine_checksum_failures_total", "where", "wire"), stats.corrupt_wire),
            (label("pyengine_checksum_failures_total", "where", "arena"), stats.corrupt_arena),
            (plain("pyengine_fenced_writes_total"), *fenced),
            (plain("pyengine_transfer_retries_total"), stats.retries),
            (plain("pyengine_pool_evictions_total"), tally.evictions),
            (plain("pyengine_pool_dropped_total"), tally.dropped),
            (label("pyengine_pool_hits_total", "tier", "dram"), tally.hits),
            (plain("pyengine_pool_misses_total"), tally.misses),
            (plain("pyengine_single_flight_total"), stats.single_flights),
            (plain("pyengine_fetches_abandoned_total"), stats.fetches_late),
        ]);
        if let Some(Capacity { limit, used, blocks, waiting, health }) = tier {
            let tiered = |name: &str| label(name, "tier", "ssd");
            samples.extend([
                (format!(r#"pyengine_pool_blocks{{node="{node}",tier="ssd",state="stored"}}"#), *blocks),
                (tiered("pyengine_pool_hits_total"), stats.hits_ssd),
                (plain("pyengine_pool_demotions_total"), stats.demotions.blocks),
                (plain("pyengine_pool_demoted_bytes_total"), stats.demotions.bytes),
                (plain("pyengine_pool_promotions_total"), stats.promotions.blocks),
                (plain("pyengine_pool_promoted_bytes_total"), stats.promotions.bytes),
                (label("pyengine_checksum_failures_total", "where", "ssd"), stats.corrupt_tier),
                (tiered("pyengine_tier_refused_writes_total"), stats.tier_refused),
                (tiered("pyengine_tier_over_quota_total"), stats.tier_over_quota),
                (tiered("pyengine_tier_limit_bytes"), *limit),
                (tiered("pyengine_tier_used_bytes"), *used),
                (tiered("pyengine_tier_waiting_bytes"), *waiting),
                (tiered("pyengine_tier_trouble"), *health as u64),
            ]);
        }
        samples
    }
}
