//! rdma
pub mod verbs;
