//! Goal: no override file panics, and every mistake names its line. Method: any text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::transport::rdma::topology::Overrides;

fuzz_target!(|text: &str| {
    if let Err(error) = Overrides::parse(text) {
        assert!(error.message.contains("line "), "{error}");
    }
});
