//! Goal: what comes to the port of metrics and health is understood, answered or waited for, within its limits, and nothing
//! panics. Method: the bytes as they come, whole and cut at every place: more bytes never take back an answer, and what is
//! waited for beyond the limit is refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::http::{HEAD_LIMIT, parse};

fuzz_target!(|data: &[u8]| {
    let whole = parse(data);
    if let Ok(Some(request)) = &whole {
        assert!(request.path.starts_with('/') && request.path.len() <= data.len());
    }
    assert!(!(data.len() >= HEAD_LIMIT && whole == Ok(None)), "waited for beyond the limit");
    // The first answer there is, is the answer to all that begins so.
    let cut = (0..data.len().min(300)).find_map(|end| match parse(&data[..end]) {
        Ok(None) => None,
        early => Some(early),
    });
    if let Some(Err(refusal)) = cut {
        // A refusal's head is text that a client can read.
        assert!(refusal.encode(false).starts_with(b"HTTP/1.1 "));
        assert!(whole.is_err(), "refused, and then understood");
    }
});
