module.exports = async () => {
  throw new Error("boom");
};
