//! Goal: no message that a peer could have sent panics or makes memory grow when it is decoded, and what is decoded is
//! what would be encoded. Method: the first byte picks the type; decode, encode, decode again.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use transfer::admin::{AdminReply, AdminRequest};
use transfer::messages::{DaemonOrder, DaemonReport, EngineMessage, LocalEvent, LocalRequest, PeerMessage, Purpose};
use transfer::transport::rdma::control::Message as RdmaMessage;
use transfer::wire::{decode, encode};

fn round_trip<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(message) = decode::<T>(bytes) {
        assert_eq!(decode::<T>(&encode(&message)).as_ref(), Ok(&message));
    }
}

fuzz_target!(|data: &[u8]| {
    let [kind, bytes @ ..] = data else { return };
    match kind % 10 {
        0 => round_trip::<LocalRequest>(bytes),
        1 => round_trip::<LocalEvent>(bytes),
        2 => round_trip::<PeerMessage>(bytes),
        3 => round_trip::<DaemonReport>(bytes),
        4 => round_trip::<DaemonOrder>(bytes),
        5 => round_trip::<EngineMessage>(bytes),
        6 => round_trip::<RdmaMessage>(bytes),
        7 => round_trip::<Purpose>(bytes),
        8 => round_trip::<AdminRequest>(bytes),
        _ => round_trip::<AdminReply>(bytes),
    }
});
