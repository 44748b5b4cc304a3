module.exports = async () => {
  throw "only text";
};
