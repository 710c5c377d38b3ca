//! What ranks on one host share: a board each, a doorbell on it, pipes between them.

pub mod board;
pub mod doorbell;
pub mod lane;
pub mod pipe;
pub mod words;
