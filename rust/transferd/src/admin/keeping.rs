//! What is kept for a time, and what owners have: `transferd pin`, `unpin`, `pins` and `quotas`.

use std::time::Duration;

use serde::Serialize;
use transfer::admin::{AccountStatus, AdminReply, AdminRequest, KEYS_LIMIT};
use transfer::engine::{Keeping, Kept, keep};
use transfer::error::Error;
use transfer::types::BlockKey;

use super::{Way, another, duration, table};
use crate::engine::size_name;

/// What became of the keys that were named.
#[derive(Serialize, Default)]
struct Outcome {
    kept: u64,
    coming: u64,
    missing: u64,
    full: u64,
}

impl Outcome {
    fn add(&mut self, outcomes: &[Keeping]) {
        for outcome in outcomes {
            match outcome {
                Keeping::Done => self.kept += 1,
                Keeping::Coming => self.coming += 1,
                Keeping::Missing => self.missing += 1,
                Keeping::Full => self.full += 1,
            }
        }
    }
}

pub fn pin(way: &Way, keys: &[BlockKey], ttl: Duration, by: &str) -> Result<(), Error> {
    let ttl_ms = keep::time(ttl, by)?;
    let outcome = ask(way, keys, |keys| AdminRequest::Keep { keys, ttl_ms, by: by.to_owned() })?;
    let Outcome { kept, coming, missing, full } = outcome;
    way.print(&outcome, || {
        format!("{kept} kept, {coming} being read from SSD, {missing} not there, {full} without room\n")
    })?;
    match (missing, full) {
        (0, 0) => Ok(()),
        (_, 0) => Err(Error::retry(format!("{missing} of {} are not there, on no medium of this node", keys.len()))),
        (..) => Err(Error::retry(format!(
            "{full} of {} found no room: at most half of the memory can be kept (`transferd pins`), and nothing while a \
             daemon drains; let something go first",
            keys.len()
        ))),
    }
}

#[derive(Serialize)]
struct LetGo {
    let_go: u64,
    not_kept: u64,
}

pub fn unpin(way: &Way, keys: &[BlockKey], by: Option<&str>) -> Result<(), Error> {
    let outcome = ask(way, keys, |keys| AdminRequest::Unkeep { keys, by: by.map(str::to_owned) })?;
    let line = LetGo { let_go: outcome.kept, not_kept: outcome.missing };
    way.print(&line, || format!("{} let go, {} not kept\n", line.let_go, line.not_kept))?;
    match line.not_kept {
        0 => Ok(()),
        missing => Err(Error::retry(format!("{missing} of {} were not kept", keys.len()))),
    }
}

fn ask(way: &Way, keys: &[BlockKey], request: impl Fn(Vec<BlockKey>) -> AdminRequest) -> Result<Outcome, Error> {
    let mut client = way.connect()?;
    let mut sum = Outcome::default();
    for keys in keys.chunks(KEYS_LIMIT) {
        match client.ask(&request(keys.to_vec()))? {
            AdminReply::Kept { outcomes } => sum.add(&outcomes),
            other => return Err(another(&other)),
        }
    }
    Ok(sum)
}

pub fn pins(way: &Way) -> Result<(), Error> {
    match way.connect()?.ask(&AdminRequest::Pins)? {
        AdminReply::Pins(kept) => way.print(&kept, || pins_text(&kept)),
        other => Err(another(&other)),
    }
}

fn pins_text(kept: &Kept) -> String {
    let Kept { blocks, bytes, limit_bytes, pins } = kept;
    let after = |milliseconds| duration(Duration::from_millis(milliseconds));
    let rows = pins.iter().map(|pin| {
        let by: String = pin.by.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        [by, pin.blocks.to_string(), pin.bytes.to_string(), after(pin.first_ms), after(pin.last_ms)]
    });
    let all = format!("{blocks} blocks kept, {bytes} bytes of at most {}\n", size_name(*limit_bytes));
    all + &table(["by", "blocks", "bytes", "first may go in", "last in"], rows)
}

pub fn quotas(way: &Way) -> Result<(), Error> {
    match way.connect()?.ask(&AdminRequest::Accounts)? {
        AdminReply::Accounts(accounts) => way.print(&accounts, || quotas_text(&accounts)),
        other => Err(another(&other)),
    }
}

fn quotas_text(accounts: &[AccountStatus]) -> String {
    if accounts.is_empty() {
        return "owners are not told apart: no [[quota]] in the daemon's configuration\n".into();
    }
    let name = |digest: Option<u64>| digest.map_or_else(|| "any".to_owned(), |digest| format!("{digest:016x}"));
    let limit = |limit: Option<u64>| limit.map_or_else(|| "none".to_owned(), size_name);
    let rows = accounts.iter().map(|account| {
        [
            name(account.namespace),
            name(account.tenant),
            account.share.to_string(),
            account.dram_bytes.to_string(),
            limit(account.dram_limit),
            account.ssd_bytes.to_string(),
            limit(account.ssd_limit),
        ]
    });
    table(["namespace", "tenant", "share", "dram bytes", "limit", "ssd bytes", "limit"], rows)
        .trim_start_matches('\n')
        .to_owned()
}

#[cfg(test)]
mod tests {
    //! Goal: what people read says what is so, whoever chose a name. Method: examples.
    use super::*;
    use transfer::engine::Pins;

    #[test]
    fn texts() {
        let pin = Pins { by: "a\u{1b}[2J".into(), blocks: 2, bytes: 8192, first_ms: 1500, last_ms: 61_000 };
        let kept = Kept { blocks: 2, bytes: 8192, limit_bytes: 1 << 30, pins: vec![pin] };
        let text = pins_text(&kept);
        assert!(text.starts_with("2 blocks kept, 8192 bytes of at most 1GiB\n"), "{text}");
        assert!(text.contains("a?[2J") && text.contains("1.5 s") && text.contains("1 min 1 s"), "{text}");
        assert!(quotas_text(&[]).contains("[[quota]]"));
        let account = AccountStatus {
            namespace: None,
            tenant: Some(255),
            share: 3,
            dram_bytes: 5,
            dram_limit: Some(1 << 20),
            ssd_bytes: 0,
            ssd_limit: None,
        };
        let text = quotas_text(&[account]);
        assert!(text.contains("any") && text.contains("00000000000000ff") && text.contains("1MiB"), "{text}");
    }
}
